"""Memory that gets fewer parts while real guests come and go by it."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, suspended
from sandyard.runtimes.microvm.memory.checking import Checker
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.merging import KEPT

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done"


async def counting(kit: Kit, pid: int) -> None:
    assert pid in await kit.agent.processes()
    first = int(await kit.output("cat /run/n"))
    await kit.output(f"while [ $(cat /run/n) -le {first} ]; do sleep 0.05; done")


def compactor_of(runtime: MicroVMRuntime) -> Compactor:
    return runtime._keeping._compactor


async def test_it_is_paused_many_times(runtime: MicroVMRuntime, base: Rootfs) -> None:
    instance = await runtime.create(SandboxSpec("often", base, SMALL, hostname="often"))
    kit, home = Kit(runtime, base, instance), runtime.host.layout.memory("often")
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done; head -c 8M /dev/urandom > /dev/shm/held")
    held = await kit.output("md5sum < /dev/shm/held")
    compacted = set[str]()
    for count in range(7):
        await kit.output(f"head -c 300K /dev/urandom > /dev/shm/{count % 3}; echo {count} >> /dev/shm/log")
        await runtime.suspend("often")
        if count != 4:  # it is woken while its memory changes
            await compactor_of(runtime).idle()
        record = await asyncio.to_thread(suspended.load, runtime.host.layout, "often")
        assert record is not None
        manifest = await asyncio.to_thread(image.load, home / record.image)
        assert len(manifest.pages) <= (KEPT if count != 4 else KEPT + 1)
        compacted.update(manifest.names)
        kit = Kit(runtime, base, await runtime.wake(instance.spec))
        assert await kit.output("md5sum < /dev/shm/held") == held
    assert (await kit.output("cat /dev/shm/log")).split() == [str(count) for count in range(7)]
    await counting(kit, counter.pid)
    assert len(compacted) > KEPT  # names that merged ones have, too
    await runtime.destroy("often")
    assert not home.exists()


async def test_copies_of_copies_stay_shallow(runtime: MicroVMRuntime, settings: Settings, base: Rootfs) -> None:
    layers = settings.paths.state / "layers"
    shutil.rmtree(layers, ignore_errors=True)
    layers.mkdir(parents=True)
    spec = SandboxSpec("copy0", base, SMALL, hostname="copy0")
    kit = Kit(runtime, base, await runtime.create(spec))
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done")
    made = list[Path]()
    for count in range(7):
        await kit.output(f"echo {count} >> /dev/shm/log; echo {count} > /dev/shm/{count}")
        made.append(layers / f"layer{count}")
        assert isinstance(kit.sandbox, MicroVMInstance)
        await kit.sandbox.commit(made[-1], memory=True)
        await runtime.destroy(kit.sandbox.spec.sandbox_id)
        await compactor_of(runtime).idle()
        # A guest shares the parts that it was started from, which are left alone unless they are many.
        assert len((await asyncio.to_thread(image.load, made[-1])).pages) <= KEPT + 1
        kit = await start(runtime, base, made[-1], f"copy{count + 1}")
    assert len((await asyncio.to_thread(image.load, made[-1])).pages) < KEPT
    await runtime.destroy("copy7")
    for count, layer in enumerate(made):
        await asyncio.to_thread(Checker().check, layer, image.load(layer))
        if count in (1, 4, 5):
            kit = await start(runtime, base, layer, f"again{count}")
            assert (await kit.output("cat /dev/shm/log")).split() == [str(number) for number in range(count + 1)]
            await counting(kit, counter.pid)
            await runtime.destroy(f"again{count}")


async def start(runtime: MicroVMRuntime, base: Rootfs, layer: Path, name: str) -> Kit:
    stack = replace(base, layers=[layer, *base.layers])
    return Kit(runtime, base, await runtime.create(SandboxSpec(name, stack, SMALL, hostname=name, memory=layer)))
