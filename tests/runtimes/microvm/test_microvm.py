"""Real guests: what differs from a container, one boot for many looks."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.doctor import diagnose
from sandyard.errors import GuestError, HostError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.assets import check_assets, load_assets, make_assets
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.layout import Layout

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)


def _fields(path: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}


async def made(runtime: MicroVMRuntime, base: Rootfs, name: str) -> tuple[MicroVMInstance, Kit]:
    instance = await runtime.create(SandboxSpec(name, base, SMALL))
    assert isinstance(instance, MicroVMInstance)
    return instance, Kit(runtime, base, instance)


async def test_without_setup_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="sandyard setup microvm"):
        load_assets(Settings(paths=PathSettings(state=tmp_path, run=tmp_path)))


async def test_a_half_made_setup_is_mended(settings: Settings) -> None:
    first = await make_assets(settings)
    first.initrd.unlink()
    with pytest.raises(HostError, match="is missing"):
        load_assets(settings)
    old = [first.initrd.with_name(f"initrd-old{number}") for number in range(4)]
    for number, path in enumerate(old):
        path.touch()
        os.utime(path, (number, number))
    assert await make_assets(settings) == first == load_assets(settings)
    assert [path.exists() for path in old] == [False, False, True, True]


async def test_a_setup_that_cannot_be_says_why(settings: Settings, tmp_path: Path) -> None:
    async def fails(said: str, **changed: Path | None) -> None:
        microvm = settings.microvm.model_copy(update=changed)
        with pytest.raises(HostError, match=said) as caught:
            await make_assets(settings.model_copy(update={"microvm": microvm}))
        assert caught.value.remedy

    other = tmp_path / "6.1.0-other"
    other.mkdir()
    (tmp_path / "text").write_text("no kernel")
    await fails("nowhere: No such file", kernel=tmp_path / "nowhere")
    await fails("not a bzImage", kernel=tmp_path / "text")
    await fails("nowhere is not a directory", modules=tmp_path / "nowhere")
    await fails("6.1.0-other is not of .*, which is Linux", modules=other)
    await fails("without microvm.modules", modules=None)
    manifest = Layout.of(settings).assets / "manifest.json"
    manifest.unlink()
    (manifest / "in the way").mkdir(parents=True)
    await fails("manifest.json: Is a directory")
    shutil.rmtree(manifest)
    made = await make_assets(settings)
    made.kernel.chmod(0o600)
    made.kernel.write_bytes(bytes(made.kernel.stat().st_size))
    with pytest.raises(HostError, match="not what setup wrote"):
        check_assets(made)
    check_assets(await make_assets(settings))


@pytest.mark.full
async def test_the_doctor_tries_every_promise_in_a_guest(settings: Settings) -> None:
    found = {finding.name: finding async for finding in diagnose(settings)}
    assert found["microVM"].detail.startswith("accelerator ")
    for name in ("microVM", "create a sandbox", "own kernel", "disk limit", "memory limit"):
        assert found[name].ok, found[name]
    missing = settings.model_copy(update={"microvm": settings.microvm.model_copy(update={"qemu": "no-such-qemu"})})
    found = {finding.name: finding async for finding in diagnose(missing)}
    assert "microvm.qemu" in (found["microVM"].remedy or "")
    assert "create a sandbox" not in found


async def test_the_vmm_is_confined(runtime: MicroVMRuntime, base: Rootfs) -> None:
    instance, kit = await made(runtime, base, "confined")
    status = await asyncio.to_thread(_fields, Path(f"/proc/{instance.pid}/status"))
    uid = runtime.host.layout.uid("confined")
    assert status["Uid"].split() == [str(uid)] * 4
    assert status["Groups"].split() == [str(uid)]
    assert (status["CapEff"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")
    root = Path(f"/proc/{instance.pid}/root")
    assert not [name for name in ("etc", "root", "home", "var", "proc") if (root / name).exists()]
    assert status["NSpid"].split() == [str(instance.pid), "1"]
    assert int(status["SigIgn"], 16) >> signal.SIGXFSZ - 1 & 1
    # What the VMM itself would meet: its own root, its own user.
    tries = ["/etc/passwd", "/proc/1/environ", str(runtime.host.layout.assets / "manifest.json"), "/shared/base"]
    tries += ["/vm/new", f"/proc/{instance.pid}/environ"]
    body = "head -c1 $f >/dev/null 2>&1 && echo read; ( : >>$f ) 2>/dev/null && echo written"
    script = f"for f in {' '.join(tries)}; do {body}; done"
    enter = ["nsenter", f"--target={instance.pid}", "--mount", "--net", "--root"]
    user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    asked = await asyncio.create_subprocess_exec(*enter, *user, "sh", "-c", script, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    assert said.split() == [b"read"]  # the image of its template, and nothing of it can be written
    networks = await asyncio.to_thread(_fields, Path(f"/proc/{instance.pid}/net/dev"))
    assert [name.strip() for name in networks] == ["lo"]
    assert await kit.output("cat /sys/fs/cgroup/sandbox/pids.max") == "64"


async def test_the_timer_of_the_boot_does_not_tick_on(runtime: MicroVMRuntime, base: Rootfs) -> None:
    instance, _ = await made(runtime, base, "quiet")
    if (await runtime.choose()).accel == "kvm":
        return  # its machine has none
    said = await instance.control.execute("human-monitor-command", {"command-line": "xp /1xw 0xfed00100"})
    assert int(said.split()[1], 16) & 0b1100 == 0  # neither interrupts nor periodic


async def test_a_new_server_adopts_what_runs_and_what_is_paused(
    runtime: MicroVMRuntime, base: Rootfs, settings: Settings
) -> None:
    _, kit = await made(runtime, base, "adopted")
    process = await kit.start("i=0; while :; do i=$((i+1)); echo $i > /tmp/n; sleep 0.1; done")
    await runtime.close()
    later = MicroVMRuntime(settings)
    try:
        adopted = await later.adopt("adopted")
        assert adopted is not None
        assert process.pid in await adopted.agent.processes()
        await adopted.pause()
        await later.close()
        last = MicroVMRuntime(settings)
        again = await last.adopt("adopted")
        assert again is not None
        assert again.paused
        await again.resume()
        assert process.pid in await again.agent.processes()
        await last.destroy("adopted")
        await last.close()
    finally:
        await later.close()


async def test_a_link_is_opened_again_at_once(runtime: MicroVMRuntime, base: Rootfs) -> None:
    """However the end of one session and the begin of the next reach the agent: none waits for a second try."""
    instance, kit = await made(runtime, base, "again")
    process = await kit.start("while :; do echo x; done")
    began = time.monotonic()
    for _ in range(10):
        assert await runtime.adopt("again") is instance
        assert process.pid in await instance.agent.processes()
    assert time.monotonic() - began < 14


@pytest.mark.full
async def test_the_agent_answers_where_no_memory_is_left(runtime: MicroVMRuntime, base: Rootfs) -> None:
    """What the agent writes to memory counts too, and it is asked for room, not killed for it."""
    instance, kit = await made(runtime, base, "filled")
    for name in ("a", "b", "c"):  # /dev/shm itself ends at 64 MiB
        await kit.output(f"mkdir /{name}; mount -t tmpfs -o size=64m {name} /{name}")
    await instance.agent.write_file("/a/fill", bytes(60 << 20))
    await instance.agent.write_file("/b/fill", bytes(40 << 20))
    with pytest.raises(GuestError, match="Cannot allocate memory"):
        await instance.agent.write_file("/c/fill", bytes(60 << 20))
    assert (await instance.usage()).memory_bytes > 100 << 20
    greedy = "x = bytearray(40 << 20); print(len(x))"
    assert (await kit.run(["python3", "-c", greedy])).status.signal == 9
    for name in ("a", "c"):
        await instance.agent.remove(f"/{name}/fill")
    assert await kit.python(greedy) == str(40 << 20)
