"""What only the container runtime promises of pause, commit, halt and boot: crashes of the server, shared layers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed, SandboxError, Unsupported
from sandyard.guest.base import ProcessSpec
from sandyard.runtimes.base import MAX_LAYERS, Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container import ContainerRuntime
from sandyard.runtimes.container.commit import loop_device
from sandyard.runtimes.container.layout import read_json, write_json

pytestmark = pytest.mark.root
SMALL = Resources(cpu=1.0, memory_mb=64, disk_mb=48, pids=32)

# Adopts a sandbox of another process, begins something with it, and dies in the middle.
CHILD = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from sandyard.config import PathSettings, Settings
from sandyard.runtimes.container import ContainerRuntime

async def main(state, run, sandbox_id, what, target, delay):
    runtime = ContainerRuntime(Settings(paths=PathSettings(state=state, run=run)))
    if what == "boot":
        spec = runtime.halts.get(sandbox_id).spec
        work = runtime.boot(spec)
        await runtime.choose()
    else:
        instance = await runtime.adopt(sandbox_id)
        work = instance.commit(Path(target)) if what == "commit" else runtime.halt(sandbox_id)
    def die():
        time.sleep(float(delay))
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die).start()
    await work
    await asyncio.sleep(30)

asyncio.run(main(*sys.argv[1:]))
"""


def spec(name: str, rootfs: Rootfs) -> SandboxSpec:
    return SandboxSpec(f"{name}{os.getpid()}", rootfs, SMALL, hostname=f"{name}{os.getpid()}")


async def begin_and_die(runtime: ContainerRuntime, sandbox_id: str, what: str, delay: float, target: Path) -> None:
    paths = runtime.settings.paths
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, str(paths.state), str(paths.run), sandbox_id, what, str(target), str(delay)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    _, errors = await asyncio.wait_for(child.communicate(), 40)
    assert child.returncode == -signal.SIGKILL, errors.decode()


async def content(instance: Instance, path: str) -> bytes:
    return b"".join([chunk async for chunk in instance.agent.read_file(path)])


async def run(instance: Instance, script: str) -> str:
    process = await instance.agent.spawn(ProcessSpec(["/bin/bash", "-c", script], cwd="/"))
    output = b"".join([data async for _, data in process.output()])
    assert (await process.wait()).code == 0, output
    return output.decode().strip()


DELAYS = (0.0, 0.004, 0.012, 0.03, 0.06, 0.1)


async def test_a_server_that_dies_while_it_commits_leaves_no_half(
    runtime: ContainerRuntime, settings: Settings, empty: Rootfs, tmp_path: Path
) -> None:
    wanted = spec("dying", empty)
    await (await runtime.create(wanted)).agent.write_file("/data", os.urandom(24 << 20))
    await runtime.close()
    whole = 0
    for number, delay in enumerate(DELAYS):
        target = tmp_path / f"layer{number}"
        await begin_and_die(runtime, wanted.sandbox_id, "commit", delay, target)
        later = ContainerRuntime(settings)
        adopted = await later.adopt(wanted.sandbox_id)
        assert adopted is not None
        if adopted.paused:
            await adopted.resume()
        await adopted.agent.hello()
        if target.exists():
            whole += 1
            copy = spec(f"copy{number}x", replace(empty, layers=[target, *empty.layers]))
            made = await later.create(copy)
            assert await content(made, "/data") == await content(adopted, "/data")
            await later.destroy(copy.sandbox_id)
        await later.close()
    assert whole < len(DELAYS)


async def test_a_server_that_dies_while_it_halts_or_boots_loses_no_file(
    runtime: ContainerRuntime, settings: Settings, empty: Rootfs, tmp_path: Path
) -> None:
    wanted = spec("halting", empty)
    await (await runtime.create(wanted)).agent.write_file("/data", b"kept" * 100_000)
    await runtime.close()
    for what in ("halt", "boot") * len(DELAYS):
        for delay in DELAYS[:4]:
            later = ContainerRuntime(settings)
            if what == "boot" and await later.adopt(wanted.sandbox_id) is not None:
                await later.halt(wanted.sandbox_id)
            if what == "halt" and wanted.sandbox_id in await later.halted():
                await later.boot(wanted)
            await later.close()
            await begin_and_die(runtime, wanted.sandbox_id, what, delay, tmp_path)
            later = ContainerRuntime(settings)
            if wanted.sandbox_id in await later.halted():
                assert await later.adopt(wanted.sandbox_id) is None
                instance = await later.boot(wanted)
            else:
                adopted = await later.adopt(wanted.sandbox_id)
                assert adopted is not None
                instance = adopted
            assert await content(instance, "/data") == b"kept" * 100_000
            await later.close()
        if what == "boot":
            break


async def test_a_paused_sandbox_outlives_its_server(
    runtime: ContainerRuntime, settings: Settings, base: Rootfs
) -> None:
    wanted = spec("frozen", base)
    made = await runtime.create(wanted)
    process = await made.agent.spawn(ProcessSpec(["/bin/sleep", "1000"]))
    await made.pause()
    await runtime.close()
    later = ContainerRuntime(settings)
    adopted = await later.adopt(wanted.sandbox_id)
    assert adopted is not None
    assert adopted.paused
    await adopted.resume()
    assert await adopted.agent.processes() == [process.pid]
    await adopted.pause()
    await later.close()
    last = ContainerRuntime(settings)
    await last.destroy(wanted.sandbox_id)  # without having adopted it
    assert await last.list() == []
    await last.close()


async def test_a_death_while_paused_is_told(runtime: ContainerRuntime, empty: Rootfs) -> None:
    made = await runtime.create(spec("doomed", empty))
    await made.pause()
    os.kill(made.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    await asyncio.sleep(0.05)
    resuming = asyncio.ensure_future(made.resume())
    await asyncio.wait_for(made.wait_dead(), 5)
    await asyncio.wait([resuming])
    with pytest.raises(SandboxError):
        await made.agent.hello()


async def test_sandboxes_of_one_layer_share_its_device(
    runtime: ContainerRuntime, empty: Rootfs, tmp_path: Path
) -> None:
    made = await runtime.create(spec("source", empty))
    await made.agent.write_file("/data", b"x" * (4 << 20))
    layer = tmp_path / "layer"
    await made.commit(layer)
    if runtime.capabilities.hard_disk_limit:
        assert layer.is_file()
    rootfs = replace(empty, layers=[layer, *empty.layers])
    copies = await asyncio.gather(*(runtime.create(spec(f"copy{n}x", rootfs)) for n in range(6)))
    assert _devices(layer) == (1 if runtime.capabilities.hard_disk_limit else 0)
    for copy in copies:
        assert (await copy.agent.stat("/data")).size == 4 << 20
        await runtime.destroy(copy.spec.sandbox_id)
    for _ in range(200):
        if loop_device(layer) is None:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the layer's device stays")


def _devices(image: Path) -> int:
    found = 0
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found += path.read_text().strip() == str(image)
        except OSError:
            continue  # it went meanwhile
    return found


async def test_disks_are_found_below_a_symlink(settings: Settings, empty: Rootfs, tmp_path: Path) -> None:
    """The kernel names the file that a device shows by its real path."""
    (tmp_path / "link").symlink_to(settings.paths.state, target_is_directory=True)
    paths = settings.paths.model_copy(update={"state": tmp_path / "link"})
    runtime = ContainerRuntime(settings.model_copy(update={"paths": paths}))
    wanted = spec("linked", empty)
    made = await runtime.create(wanted)
    try:
        for path in ("/first", "/second"):
            await made.agent.write_file(path, b"kept" * 1000)
            await made.commit(tmp_path / path[1:])
            await runtime.halt(wanted.sandbox_id)
            made = await runtime.boot(wanted)
        rootfs = replace(empty, layers=[tmp_path / "second", *empty.layers])
        copy = await runtime.create(spec("copy", rootfs))
        for path in ("/first", "/second"):
            assert await content(made, path) == await content(copy, path) == b"kept" * 1000
    finally:
        for sandbox_id in await runtime.list():
            await runtime.destroy(sandbox_id)
        await runtime.close()


async def test_layers_have_a_limit(runtime: ContainerRuntime, empty: Rootfs, tmp_path: Path) -> None:
    most = replace(empty, layers=list(empty.layers) * MAX_LAYERS)
    too_many = replace(empty, layers=list(empty.layers) * (MAX_LAYERS + 1))
    with pytest.raises(CreateFailed, match="layers"):
        await runtime.create(spec("many", too_many))
    distinct = []
    for number in range(MAX_LAYERS):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / f"file{number}").write_text("x")
        distinct.append(tmp_path / str(number))
    made = await runtime.create(spec("full", replace(most, layers=distinct)))
    assert (await made.agent.stat("/file63")).size == 1
    with pytest.raises(Unsupported, match="layers"):
        await made.commit(tmp_path / "more")


async def test_what_was_halted_half_before_the_host_went_down_is_not_booted(
    runtime: ContainerRuntime, empty: Rootfs
) -> None:
    wanted = spec("halved", empty)
    await runtime.create(wanted)
    await runtime.halt(wanted.sandbox_id)
    record = runtime.layout.disks / wanted.sandbox_id / "halted.json"
    content = read_json(record)
    assert content is not None
    write_json(record, {**content, "boot_id": "of an earlier boot"})
    assert await runtime.halted() == [wanted.sandbox_id]  # whole: another boot changes nothing
    write_json(record, {**content, "boot_id": "of an earlier boot", "complete": False})
    assert await runtime.halted() == []
    assert await runtime.list() == [wanted.sandbox_id]
    with pytest.raises(CreateFailed, match="not halted"):
        await runtime.boot(wanted)


async def test_a_boot_that_fails_leaves_it_halted(
    runtime: ContainerRuntime, empty: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = spec("failing", empty)
    await (await runtime.create(wanted)).agent.write_file("/data", b"kept")
    await runtime.halt(wanted.sandbox_id)

    async def refuse(_sandbox_id: str) -> None:
        raise CreateFailed("agent", "no answer")

    broken: Callable[[str], Awaitable[None]] = refuse
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_link", broken)
        with pytest.raises(CreateFailed, match="no answer"):
            await runtime.boot(wanted)
    assert await runtime.halted() == [wanted.sandbox_id]
    booted = await runtime.boot(wanted)
    assert await content(booted, "/data") == b"kept"


async def test_a_pause_that_fails_leaves_a_running_sandbox(
    runtime: ContainerRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not freeze in time, as one that waits for a disk would."""
    made = await runtime.create(spec("busy", base))
    monkeypatch.setattr(type(runtime.cgroups), "frozen", lambda *_: False)
    monkeypatch.setattr("sandyard.runtimes.container.runtime.FREEZE_TIMEOUT", 0.05)
    with pytest.raises(SandboxError, match="do not freeze"):
        await made.pause()
    assert not made.paused
    assert await run(made, "echo runs") == "runs"
