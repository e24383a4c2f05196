"""Why a guest is no more, and what one may take of the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import AgentLinkError, DeathReason
from sandyard.runtimes.base import Death, Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
OUT_OF_MEMORY = """
import os
with open("/sys/fs/cgroup/cgroup.procs", "w") as group:
    group.write("0")
os.mkdir("/hole")
if os.system("mount -t tmpfs -o size=4g hole /hole") != 0:
    raise SystemExit("no mount")
with open("/hole/it", "wb") as file:
    while True:
        file.write(bytes(1 << 16))
"""


async def made(runtime: MicroVMRuntime, base: Rootfs, name: str, resources: Resources = SMALL) -> Kit:
    return Kit(runtime, base, await runtime.create(SandboxSpec(name, base, resources)))


def vmm(instance: Instance) -> int:
    assert isinstance(instance, MicroVMInstance)
    return instance.pid


async def death(kit: Kit) -> Death:
    return await asyncio.wait_for(kit.sandbox.wait_dead(), 120)


async def test_a_guest_that_panics_and_a_vmm_that_is_killed(runtime: MicroVMRuntime, base: Rootfs) -> None:
    panics = await made(runtime, base, "panics")
    await panics.start("echo c > /proc/sysrq-trigger")
    how = await death(panics)
    assert how.reason is DeathReason.CRASHED
    assert "Kernel panic" in how.detail
    await runtime.destroy("panics")
    killed = await made(runtime, base, "killed")
    os.kill(vmm(killed.sandbox), signal.SIGKILL)
    how = await death(killed)
    assert how.reason is DeathReason.HOST
    assert "was ended" in how.detail
    assert await runtime.adopt("killed") is None


@pytest.mark.full
async def test_a_guest_that_is_turned_off(runtime: MicroVMRuntime, base: Rootfs) -> None:
    kit = await made(runtime, base, "off")
    await kit.start("echo o > /proc/sysrq-trigger")
    how = await death(kit)
    assert how.reason is DeathReason.CRASHED
    assert "the guest ended" in how.detail


@pytest.mark.full
async def test_a_guest_without_memory(runtime: MicroVMRuntime, base: Rootfs) -> None:
    """Its root left the group with the limit, and took all that the kernel has."""
    kit = await made(runtime, base, "full")
    await kit.start(["python3", "-c", OUT_OF_MEMORY])
    how = await death(kit)
    assert how.reason is DeathReason.OOM
    assert "Kernel panic" in how.detail


@pytest.mark.full
async def test_a_vmm_beyond_its_memory(runtime: MicroVMRuntime, base: Rootfs) -> None:
    """The host's limit is above all that a guest and an honest VMM can take: here it is brought down to that."""
    kit = await made(runtime, base, "beyond")
    cgroups = runtime.host.cgroups
    group = next(root for name, root in cgroups.roots.items() if name in ("", "memory")) / cgroups.parent / "beyond"
    name, now = ("memory.max", "memory.current")
    if cgroups.version == 1:
        name, now = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    used = int(await asyncio.to_thread((group / now).read_text))
    await asyncio.to_thread((group / name).write_text, str(used + (4 << 20)))
    with contextlib.suppress(AgentLinkError):  # the start alone may be too much
        await kit.start("head -c 100000000 /dev/zero > /dev/shm/x; head -c 100000000 /dev/zero | tail -c 90000000")
    how = await death(kit)
    assert how.reason is DeathReason.OOM
    assert "VMM" in how.detail


@pytest.mark.full
async def test_a_guest_has_the_processors_and_the_share_of_them_it_was_given(
    runtime: MicroVMRuntime, base: Rootfs
) -> None:
    kit = await made(runtime, base, "half", Resources(cpu=1.5, memory_mb=128, disk_mb=64, pids=64))
    assert await kit.output("nproc") == "2"
    await runtime.destroy("half")
    kit = await made(runtime, base, "tenth", Resources(cpu=0.1, memory_mb=128, disk_mb=64, pids=64))
    await kit.start("while :; do :; done")
    before, began = (await kit.sandbox.usage()).cpu_seconds, time.monotonic()
    await asyncio.sleep(3)
    used = ((await kit.sandbox.usage()).cpu_seconds - before) / (time.monotonic() - began)
    assert used < 0.15


@pytest.mark.full
async def test_a_guest_writes_no_faster_than_it_may(settings: Settings, base: Rootfs) -> None:
    slow = settings.model_copy(update={"microvm": settings.microvm.model_copy(update={"disk_mb_s": 4})})
    runtime = MicroVMRuntime(slow)
    write = "dd if=/dev/zero of=/big bs=1M count=24 oflag=direct conv=fsync"
    try:
        kit = await made(runtime, base, "slow")
        ran = await kit.run(write, timeout=60)
        assert ran.status.code == 0
        assert ran.seconds > 3  # a burst of a second's worth is let through
        await kit.sandbox.commit(Path(settings.paths.state / "layer"))
        ran = await kit.run(write, timeout=60)
        assert ran.seconds > 3, "above a commit it is as slow"
    finally:
        await runtime.destroy("slow")
        await runtime.close()
