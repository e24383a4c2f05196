"""What only the container runtime promises: deaths, crashes of the server, no trace."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import ContainerSettings, Settings
from sandyard.errors import CreateFailed, DeathReason, HostError
from sandyard.guest.base import ProcessSpec
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container import ContainerRuntime
from sandyard.runtimes.container.instance import ContainerInstance

pytestmark = pytest.mark.root
SMALL = Resources(cpu=1.0, memory_mb=64, disk_mb=16, pids=32)


def spec(name: str, rootfs: Rootfs) -> SandboxSpec:
    return SandboxSpec(f"{name}{os.getpid()}", rootfs, SMALL, hostname=f"{name}{os.getpid()}")


async def create(runtime: ContainerRuntime, wanted: SandboxSpec) -> ContainerInstance:
    made = await runtime.create(wanted)
    assert isinstance(made, ContainerInstance)
    return made


def traces(runtime: ContainerRuntime, wanted: SandboxSpec) -> list[str]:
    """Everything on the host that still tells of the sandbox."""
    found = []
    sandbox_id = wanted.sandbox_id
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            hostname = (process / "root/etc/hostname").read_text().strip()
        except OSError:
            continue
        if hostname == wanted.hostname or (sandbox_id in command and "sandyard-launch" in command):
            found.append(f"process {process.name}: {command!r}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if sandbox_id in backing.read_text():
                found.append(str(backing))
        except OSError:
            continue
    layout = runtime.layout
    homes = [layout.home(sandbox_id), layout.engine / sandbox_id, layout.disks / sandbox_id]
    found += [str(path) for path in homes if path.exists()]
    found += [name for name in runtime.cgroups.ids() if name == sandbox_id]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if sandbox_id in line]
    return found


async def assert_no_trace(runtime: ContainerRuntime, wanted: SandboxSpec) -> None:
    """The kernel lets go of a loop device a moment after the last process."""
    deadline = time.monotonic() + 5
    while found := traces(runtime, wanted):
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)


async def test_a_crash_of_pid_1_is_told(runtime: ContainerRuntime, empty: Rootfs) -> None:
    made = await create(runtime, spec("crash", empty))
    os.kill(made.pid, signal.SIGKILL)
    death = await asyncio.wait_for(made.wait_dead(), 5)
    assert death.reason is DeathReason.CRASHED
    assert await runtime.adopt(made.spec.sandbox_id) is None
    assert made.spec.sandbox_id in await runtime.list()  # until it is destroyed
    await runtime.destroy(made.spec.sandbox_id)
    await assert_no_trace(runtime, made.spec)


async def test_a_death_by_memory_is_told(runtime: ContainerRuntime, base: Rootfs) -> None:
    """Memory that no process holds (files of /dev/shm) leaves only PID 1 to kill."""
    wanted = replace(spec("oom", base), resources=replace(SMALL, memory_mb=32))
    made = await create(runtime, wanted)
    fill = "for n in 1 2 3 4 5 6 7 8; do head -c 60M /dev/zero > /dev/shm/$n; done"
    for _ in range(20):
        try:
            process = await made.agent.spawn(ProcessSpec(["/bin/bash", "-c", fill]))
            await asyncio.wait_for(process.wait(), 10)
            await made.agent.write_file("/dev/shm/agent", bytes(40 << 20))
        except Exception:  # noqa: BLE001 — whichever way it fails; the death below is what counts
            pass
        if (await made.usage()).oom_kills and await _is_dead(made):
            break
    assert (await made.usage()).oom_kills >= 1
    if await _is_dead(made):
        death = await made.wait_dead()
        assert death.reason is DeathReason.OOM
        assert "32 MiB" in death.detail


async def _is_dead(made: ContainerInstance) -> bool:
    try:
        await asyncio.wait_for(made.wait_dead(), 0.2)
    except TimeoutError:
        return False
    return True


async def test_another_process_adopts_what_lives(runtime: ContainerRuntime, settings: Settings, base: Rootfs) -> None:
    made = await create(runtime, spec("adopt", base))
    await made.agent.write_file("/kept", b"kept")
    await runtime.close()  # as a stopped server: the sandbox goes on
    later = ContainerRuntime(settings)
    adopted = await later.adopt(made.spec.sandbox_id)
    assert adopted is not None
    assert adopted.spec == made.spec
    assert b"".join([chunk async for chunk in adopted.agent.read_file("/kept")]) == b"kept"
    waiting = asyncio.ensure_future(adopted.wait_dead())
    await later.destroy(made.spec.sandbox_id)
    assert (await asyncio.wait_for(waiting, 5)).reason is DeathReason.KILLED
    await assert_no_trace(later, made.spec)
    await later.close()


async def test_a_recycled_pid_is_never_taken(runtime: ContainerRuntime, settings: Settings, empty: Rootfs) -> None:
    made = await create(runtime, spec("recycle", empty))
    await runtime.close()
    later = ContainerRuntime(settings)
    (later.layout.home(made.spec.sandbox_id) / "pid").write_text(str(os.getpid()))
    assert await later.adopt(made.spec.sandbox_id) is None
    await later.destroy(made.spec.sandbox_id)  # and we are still here
    await assert_no_trace(later, made.spec)
    await later.close()


async def test_a_record_of_an_earlier_boot_is_not_adopted(
    runtime: ContainerRuntime, settings: Settings, empty: Rootfs
) -> None:
    made = await create(runtime, spec("boot", empty))
    await runtime.close()
    record = runtime.layout.home(made.spec.sandbox_id) / "state.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "boot_id": "another"}))
    later = ContainerRuntime(settings)
    assert await later.adopt(made.spec.sandbox_id) is None
    record.write_text('{"half')
    assert await later.adopt(made.spec.sandbox_id) is None
    await later.destroy(made.spec.sandbox_id)
    await assert_no_trace(later, made.spec)
    await later.close()


# A child that creates, and is killed (-9) at a named step or after a while.
CHILD = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from sandyard.config import PathSettings, Settings
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container import ContainerRuntime, runtime as module, launch
state, run, sandbox_id, layer, step = sys.argv[1:]
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
settings = Settings(paths=PathSettings(state=Path(state), run=Path(run)))
async def main():
    runtime = ContainerRuntime(settings)
    await runtime.choose()
    if step == "record": module.save_record = die
    elif step == "disk": type(runtime.disks).prepare = die
    elif step == "config": module.write_json = die
    elif step == "socket": launch._run = die
    elif step == "connect": module.open_agent = die
    elif step == "made": pass
    else: threading.Timer(float(step), die).start()
    await runtime.create(SandboxSpec(sandbox_id, Rootfs([Path(layer)]), Resources(1.0, 64, 16, 32), sandbox_id))
    print("created", flush=True)
    if step in ("made",): die()
    time.sleep(30)
asyncio.run(main())
"""
DELAYS = [str(n / 1000) for n in range(2, 58, 8)]


@pytest.mark.timeout(120)
async def test_a_server_killed_at_any_step_of_create_leaves_what_destroy_removes(
    runtime: ContainerRuntime, empty: Rootfs
) -> None:
    await runtime.choose()
    for number, step in enumerate(["record", "disk", "config", "socket", "connect", "made", *DELAYS]):
        wanted = spec(f"kill{number}x", empty)
        await _create_and_die(runtime, wanted, step)
        await runtime.destroy(wanted.sandbox_id)
        assert wanted.sandbox_id not in await runtime.list()
        await assert_no_trace(runtime, wanted)


async def _create_and_die(runtime: ContainerRuntime, wanted: SandboxSpec, step: str) -> None:
    paths = runtime.settings.paths
    arguments = [str(paths.state), str(paths.run), wanted.sandbox_id, str(wanted.rootfs.layers[0]), step]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, errors = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == -signal.SIGKILL, errors.decode()


async def test_an_engine_that_outlives_its_server_is_found_and_killed(runtime: ContainerRuntime, empty: Rootfs) -> None:
    wanted = spec("making", empty)
    await runtime.choose()
    home = runtime.layout.home(wanted.sandbox_id)
    home.mkdir()
    engine = await asyncio.create_subprocess_exec("/bin/sleep", "60", env={"SANDYARD_MAKING": str(home)})
    other = await asyncio.create_subprocess_exec("/bin/sleep", "60", env={"SANDYARD_MAKING": f"{home}2"})
    assert await runtime.adopt(wanted.sandbox_id) is None
    await runtime.destroy(wanted.sandbox_id)
    assert await asyncio.wait_for(engine.wait(), 5) == -signal.SIGKILL
    assert other.returncode is None
    other.kill()
    await other.wait()
    await assert_no_trace(runtime, wanted)


async def test_a_create_that_cannot_be_names_the_stage(runtime: ContainerRuntime, empty: Rootfs) -> None:
    with pytest.raises(CreateFailed, match="rootfs: layer /nowhere") as failure:
        await runtime.create(replace(spec("stage", empty), rootfs=Rootfs([Path("/nowhere")])))
    assert failure.value.stage == "rootfs"
    choice = await runtime.choose()
    broken = replace(choice, engine=replace(choice.engine, path="/bin/false"))
    with pytest.raises(CreateFailed, match="said nothing") as failure:
        await runtime.create_with(broken, spec("stage", empty))
    assert failure.value.stage == "engine"
    absent = replace(choice, engine=replace(choice.engine, path="/no/engine"))
    with pytest.raises(CreateFailed, match="/no/engine: No such file"):
        await runtime.create_with(absent, spec("stage", empty))
    blank = runtime.disks.blank(SMALL.disk_mb)
    blank.write_bytes(b"")  # a damaged image
    with pytest.raises(CreateFailed) as failure:
        await runtime.create(spec("stage", empty))
    assert failure.value.stage == "disk"
    blank.unlink()
    await assert_no_trace(runtime, spec("stage", empty))
    assert await runtime.list() == []


async def test_a_file_that_cannot_be_written_is_a_named_stage(
    runtime: ContainerRuntime, empty: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sandyard.runtimes.container.runtime.write_json", full)
    with pytest.raises(CreateFailed, match="No space left") as failure:
        await runtime.create(spec("full", empty))
    assert failure.value.stage == "files"
    await assert_no_trace(runtime, spec("full", empty))


async def test_a_sandbox_without_a_disk_limit_is_removed_too(settings: Settings, base: Rootfs) -> None:
    plain = settings.model_copy(update={"container": ContainerSettings(disk="none")})
    runtime = ContainerRuntime(plain)
    made = await create(runtime, spec("plain", base))
    assert runtime.capabilities.hard_disk_limit is False
    await made.agent.write_file("/home/user/file", bytes(1 << 20), user="user")
    assert (await made.usage()).disk_bytes >= 1 << 20
    await runtime.destroy(made.spec.sandbox_id)
    await assert_no_trace(runtime, made.spec)
    await runtime.close()


async def test_no_engine_is_said_with_its_remedy(settings: Settings) -> None:
    wanted = settings.model_copy(update={"container": ContainerSettings(engine="runsc")})
    runtime = ContainerRuntime(wanted)
    probe = await runtime.probe()
    assert not probe.works
    assert probe.remedy == "apt-get install runsc"
    with pytest.raises(CreateFailed, match="no OCI engine found"):
        await runtime.create(SandboxSpec("x", Rootfs([])))
    await runtime.close()


async def test_an_engine_that_fails_gives_way_to_one_that_works(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crun").write_text("#!/bin/sh\n[ $1 = --version ] && echo crun version 0.1 && exit\nexit 1\n")
    (tmp_path / "crun").chmod(0o755)
    monkeypatch.setattr("sandyard.runtimes.container.choice._SEARCH", f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin")
    paths = settings.paths.model_copy(update={"state": settings.paths.state / "other"})
    runtime = ContainerRuntime(settings.model_copy(update={"paths": paths}))
    choice = await runtime.choose()
    assert choice.engine.name == "runc"
    await runtime.close()
    monkeypatch.setattr("sandyard.runtimes.container.choice._SEARCH", str(tmp_path))
    runtime = ContainerRuntime(settings.model_copy(update={"paths": paths}))
    with pytest.raises(HostError, match="crun with disk loop: create failed at engine"):
        await runtime.choose()
    await runtime.close()


async def test_a_choice_that_no_longer_holds_is_made_anew(settings: Settings) -> None:
    paths = settings.paths.model_copy(update={"state": settings.paths.state / "changed"})
    runtime = ContainerRuntime(settings.model_copy(update={"paths": paths}))
    await runtime.choose()
    kept = paths.state / "engine.json"
    record = json.loads(kept.read_text())
    kept.write_text(json.dumps({**record, "engine": {**record["engine"], "path": "/bin/false"}}))
    later = ContainerRuntime(runtime.settings)
    assert (await later.choose()).engine.path == "/bin/false"  # believed, until tried
    assert (await later.probe()).works
    assert json.loads(kept.read_text()) == record
    await later.close()
    await runtime.close()


async def test_a_path_too_long_for_sockets_is_refused(settings: Settings, tmp_path: Path) -> None:
    paths = settings.paths.model_copy(update={"run": tmp_path / ("x" * 90)})
    runtime = ContainerRuntime(settings.model_copy(update={"paths": paths}))
    with pytest.raises(HostError, match="too long"):
        await runtime.choose()
    await runtime.close()


@pytest.mark.timeout(120)
async def test_a_burst_leaves_no_trace(runtime: ContainerRuntime, empty: Rootfs) -> None:
    wanted = [spec(f"burst{number}x", empty) for number in range(16)]
    made = await asyncio.gather(*(runtime.create(each) for each in wanted))
    await asyncio.gather(*(each.agent.hello() for each in made))
    await asyncio.gather(*(runtime.destroy(each.sandbox_id) for each in wanted))
    for each in wanted:
        await assert_no_trace(runtime, each)
