"""Memory that a guest gives back to the host: that it comes, and that nothing is lost with it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit, eventually
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.machine import Machine
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.pages import Region, changed
from sandyard.runtimes.microvm.record import load_region

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
TAKEN_MB = 96
HOLD = f"import sys; held = bytearray(b'x') * ({TAKEN_MB} << 20); print('held', flush=True); sys.stdin.read()"
FEATURES = "cat /sys/bus/virtio/drivers/virtio_balloon/virtio*/features"
REPORTING, POISON = 5, 4  # bits of the device's features
# The interrupts of the device: one for each that the host answered.
REPORTS = """
import glob, time
device = glob.glob("/sys/bus/virtio/drivers/virtio_balloon/virtio*")[0].split("/")[-1]
def reports():
    (line,) = (line for line in open("/proc/interrupts") if line.split()[-1] == device)
    return int(line.split()[1])
"""
# Fills memory with what tells where it is, looks after it, frees it, and lets it be long enough to be given back.
CHECKER = """
import mmap, os, random, struct, time
def page(number, at):
    return struct.pack("<QQ", number, at) * 256
def check(number, memory):
    for at in range(len(memory) // 4096):
        if memory[at * 4096 : at * 4096 + 4096] != page(number, at):
            seen = bytes(memory[at * 4096 : at * 4096 + 32])
            open("/run/lost", "w").write(f"page {at} of {number} is {seen}")
            raise SystemExit(1)
    memory.close()
number, rests, held = 0, 0, []
while True:
    number += 1
    memory = mmap.mmap(-1, random.choice((16, 64, 700, 1800)) * 4096)
    for at in range(len(memory) // 4096):
        memory[at * 4096 : at * 4096 + 4096] = page(number, at)
    held.append((number, memory))
    if len(held) > 6:
        check(*held.pop(random.randrange(len(held))))
    if number % 9 == 0:
        while len(held) > 1:
            check(*held.pop())
        time.sleep(2.5)
        rests += 1
        with open("/run/draft", "w") as file:
            file.write(str(rests))
        os.rename("/run/draft", "/run/rests")
"""


@pytest.fixture
def layers(settings: Settings) -> Path:
    home = settings.paths.state / "layers"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


async def made(runtime: MicroVMRuntime, spec: SandboxSpec) -> Kit:
    return Kit(runtime, spec.rootfs, await runtime.create(spec))


@asynccontextmanager
async def copied(runtime: MicroVMRuntime, base: Rootfs, layer: Path) -> AsyncIterator[Kit]:
    stack = replace(base, layers=[layer, *base.layers])
    try:
        yield await made(runtime, SandboxSpec("copy", stack, SMALL, hostname="copy", memory=layer))
    finally:
        await runtime.destroy("copy")


def own_mib(kit: Kit, runtime: MicroVMRuntime) -> tuple[float, float]:
    """Of the guest's pages, and of all that its VMM was counted for but files."""
    instance = kit.sandbox
    assert isinstance(instance, MicroVMInstance)
    sandbox_id = instance.spec.sandbox_id
    size = runtime.host.starter.memory_mb(instance.spec) << 20
    region = Region(instance.pid, load_region(runtime.host.layout.home(sandbox_id)), size)
    used = runtime.host.cgroups.read(sandbox_id)
    pages = sum(end - first for first, end in changed(region))
    return pages * PAGE / (1 << 20), (used.memory - used.cache) / (1 << 20)


async def test_what_a_process_had_is_given_back(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    kit = await made(runtime, SandboxSpec("gives", base, SMALL))
    assert (await kit.output(FEATURES))[REPORTING] == "1"
    await kit.python("print()")  # with all that this needs
    pages, counted = await asyncio.to_thread(own_mib, kit, runtime)
    instance = kit.sandbox
    assert isinstance(instance, MicroVMInstance)
    assert "THP_enabled:\t0" in await asyncio.to_thread(Path(f"/proc/{instance.pid}/status").read_text)
    holder = await kit.start(["python3", "-c", HOLD], stdin=True)
    async for _, data in holder.output():
        assert b"held" in data
        break
    more_pages, more_counted = await asyncio.to_thread(own_mib, kit, runtime)
    assert more_pages > pages + TAKEN_MB - 8
    assert more_counted > counted + TAKEN_MB - 8
    together = await asyncio.to_thread(runtime.host_memory)
    assert (together.bytes - together.cache) / (1 << 20) > more_counted - 8
    await holder.close_stdin()

    async def fell() -> bool:
        now_pages, now_counted = await asyncio.to_thread(own_mib, kit, runtime)
        # What VMMs in software keep of translated code grows by itself.
        return now_pages < pages + 16 and now_counted < counted + 48

    await eventually(fell, "memory came back", 10)
    size = await kit.sandbox.commit(layers / "one", memory=True, durable=False)
    assert size < (pages + 24) * (1 << 20), "what was given back is not in a snapshot"
    # It can be had again.
    assert await kit.python(f"print((bytearray(b'a') * ({TAKEN_MB} << 20)).count(b'a') >> 20)") == str(TAKEN_MB)


@pytest.mark.full
async def test_a_guest_at_rest_reports_nothing(runtime: MicroVMRuntime, base: Rootfs) -> None:
    kit = await made(runtime, SandboxSpec("rests", base, SMALL))
    script = f"""{REPORTS}
before = reports()
del bytearray(b"x" * (16 << 20))[:]
time.sleep(12)  # what was freed until now is reported
settled = reports()
time.sleep(10)
print(settled - before, reports() - settled)
"""
    first, then = (await kit.output(["python3", "-c", script])).split()
    assert int(first) > 0
    assert int(then) <= 1  # where the kernel freed something by itself


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_nothing_is_lost_while_copies_are_made(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    """Snapshots, forks, pauses and suspends, at any moment of what a guest gives back."""
    spec = SandboxSpec("source", base, SMALL)
    kit = await made(runtime, spec)
    checker = await kit.start(["python3", "-c", CHECKER])
    await kit.output("while [ ! -s /run/rests ]; do sleep 0.05; done")
    last: Path | None = None
    for count in range(2):
        layer = layers / f"layer{count}"
        await kit.sandbox.commit(layer, memory=True, durable=count % 2 == 0, parent=last)
        last = layer
        async with copied(runtime, base, layer) as copy:
            await _checks(copy, checker.pid)
            await copy.sandbox.commit(layers / f"again{count}", memory=True, durable=False)
        async with copied(runtime, base, layers / f"again{count}") as copy:
            await _checks(copy, checker.pid)
        await kit.sandbox.pause()
        await asyncio.sleep(0.5)
        await kit.sandbox.resume()
        await _checks(kit, checker.pid)
        await asyncio.sleep(1.2 * count)  # another moment each time
        await runtime.suspend("source")
        kit = Kit(runtime, base, await runtime.wake(spec))
        await _checks(kit, checker.pid)
    assert int(await kit.python(f"{REPORTS}print(reports())")) > 5


async def _checks(kit: Kit, pid: int) -> None:
    """The checker of this pid goes on: what it had, and what it gets from here on, is what it wrote."""
    script = (
        "n=$(cat /run/rests); while [ $(cat /run/rests) -le $((n+1)) ] && [ ! -e /run/lost ]; do sleep 0.1; done;"
        f" cat /run/lost 2>/dev/null || [ -d /proc/{pid} ] && echo whole"
    )
    assert (await kit.run(script, timeout=120)).text == "whole"


async def test_a_kernel_that_relies_on_free_pages_reports_none(
    runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would find there again is not zero."""
    plain = Machine._append
    monkeypatch.setattr(Machine, "_append", lambda self: f"{plain(self)} init_on_free=1")
    # A size of its own: a base that booted without would be taken.
    kit = await made(runtime, SandboxSpec("zeroes", base, replace(SMALL, memory_mb=136)))
    features = await kit.output(FEATURES)
    assert (features[REPORTING], features[POISON]) == ("0", "0")
