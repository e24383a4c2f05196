"""MicroVMs: boot, snapshot, restore, pause and fork, by the size of their memory and by how much of it changed.

What is to be seen is that cost follows what changed, not the size. The runtime is measured by itself; on a host
without KVM the guests run in software, where only the ratios say something.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.measure import Figure, Report
from sandyard.config import Settings
from sandyard.guest.base import ProcessSpec
from sandyard.images.templates import TemplateStore
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.pages import Region, changed
from sandyard.runtimes.microvm.record import load_region

GUEST_MB = (256, 1024)
DIRTY_MB = (0, 64, 512)
CHILDREN = 8
_CHANGES_MB = 16  # of one child
_HOLD = (
    "import sys, time; held = bytearray(b'x') * (int(sys.argv[1]) << 20); print('held', flush=True); time.sleep(9999)"
)


async def memory(report: Report, settings: Settings, rounds: int) -> None:
    """Every combination that fits. Skipped, with the reason, where no guest boots."""
    runtime = MicroVMRuntime(settings)
    probe = await runtime.probe()
    if not probe.works:
        report.skip("microvm", probe.detail)
        return
    try:
        for guest_mb in GUEST_MB:
            for dirty_mb in DIRTY_MB:
                if dirty_mb < guest_mb:
                    await _Case(report, runtime, settings, guest_mb, dirty_mb).run(rounds)
    finally:
        for sandbox_id in await runtime.list():
            await runtime.destroy(sandbox_id)
        await runtime.close()


class _Case:
    def __init__(
        self, report: Report, runtime: MicroVMRuntime, settings: Settings, guest_mb: int, dirty_mb: int
    ) -> None:
        self._report = report
        self._runtime = runtime
        self._rootfs = TemplateStore(settings).get("base").rootfs
        self._guest_mb = guest_mb
        self._dirty_mb = dirty_mb
        self._layers = settings.paths.state / "layers"
        self._layers.mkdir(exist_ok=True)
        self._count = 0

    async def run(self, rounds: int) -> None:
        if self._dirty_mb == DIRTY_MB[0]:
            await self._boot(rounds)
        source = await self._create("source", None)
        if self._dirty_mb:
            await _dirty(source, self._dirty_mb)
        layer = await self._snapshots(source, rounds)
        await self._moves(source, rounds)
        await self._forks(layer, rounds)
        await self._runtime.destroy("source")

    async def _boot(self, rounds: int) -> None:
        """The first of a size boots, the others are copies of it."""
        self._add("boot, first create of a size", [await self._timed(lambda: self._create("first", None))], kept=False)
        await self._runtime.destroy("first")
        await self._copies("create", None, rounds)

    async def _copies(self, name: str, layer: Path | None, rounds: int) -> None:
        samples = []
        for _ in range(rounds):
            samples.append(await self._timed(lambda: self._create("copy", layer)))
            await self._runtime.destroy("copy")
        self._add(name, samples)

    async def _snapshots(self, source: MicroVMInstance, rounds: int) -> Path:
        """Each of what changed since the one before."""
        samples: list[float] = []
        costs: list[float] = []
        still: list[float] = []
        last: Path | None = None
        for _ in range(rounds):
            layer, parent = self._layer(), last

            async def take(layer: Path = layer, parent: Path | None = parent) -> None:
                costs.append(await source.commit(layer, durable=True, parent=parent, memory=True) / (1 << 20))

            samples.append(await self._timed(take))
            still.append(source.still_seconds * 1e3)
            last = layer
        assert last is not None
        note = f"{costs[0]:.1f} MiB of disk, later ones {min(costs[1:] or costs):.1f}"
        self._add("snapshot, first", samples[:1], note=note)
        self._add("snapshot, next", samples[1:] or samples)
        self._add("its source stands still, first", still[:1])
        self._add("its source stands still, next", still[1:] or still)
        await self._copies("restore to the agent's answer", last, rounds)
        return last

    async def _moves(self, source: MicroVMInstance, rounds: int) -> None:
        slept, woke = [], []
        for _ in range(rounds):
            slept.append(await self._timed(lambda: self._runtime.suspend("source")))
            woke.append(await self._timed(lambda: self._runtime.wake(source.spec)))
        self._add("pause, first", slept[:1])
        self._add("pause, again", slept[1:] or slept)
        self._add("resume", woke)

    async def _forks(self, layer: Path, rounds: int) -> None:
        samples: list[float] = []
        names = [f"child{number}" for number in range(CHILDREN)]
        for last in (False,) * (min(rounds, 3) - 1) + (True,):
            source = self._runtime.host.instances["source"]
            own = self._layer()

            async def fork(source: MicroVMInstance = source, own: Path = own) -> None:
                await source.commit(own, durable=False, memory=True)
                await asyncio.gather(*(self._create(name, own) for name in names))

            samples.append(await self._timed(fork))
            if last:
                await self._weigh(names)
            for name in names:
                await self._runtime.destroy(name)
        self._add(f"fork x {CHILDREN}", samples)

    async def _weigh(self, names: list[str]) -> None:
        children = [self._runtime.host.instances[name] for name in names]
        before = [await asyncio.to_thread(own_mib, self._runtime, child) for child in children]
        await _dirty(children[0], _CHANGES_MB)
        after = await asyncio.to_thread(own_mib, self._runtime, children[0])
        note = f"own pages, then {after - before[0]:.1f} MiB more for {_CHANGES_MB} MiB written"
        self._add("memory of a fork's child", before, unit="MiB", note=note)

    async def _create(self, name: str, layer: Path | None) -> MicroVMInstance:
        rootfs: Rootfs = self._rootfs if layer is None else replace(self._rootfs, layers=[layer, *self._rootfs.layers])
        resources = Resources(memory_mb=self._guest_mb, disk_mb=256)
        made = await self._runtime.create(SandboxSpec(name, rootfs, resources, hostname=name, memory=layer))
        assert isinstance(made, MicroVMInstance)
        return made

    def _layer(self) -> Path:
        self._count += 1
        return self._layers / f"m{self._guest_mb}d{self._dirty_mb}n{self._count}"

    async def _timed(self, work: Callable[[], Awaitable[object]]) -> float:
        began = time.perf_counter()
        await work()
        return (time.perf_counter() - began) * 1e3

    def _add(self, what: str, samples: list[float], *, unit: str = "ms", note: str = "", kept: bool = True) -> None:
        small = name_of(what, GUEST_MB[0], self._dirty_mb)
        name = name_of(what, self._guest_mb, self._dirty_mb)
        peer = small if kept and name != small and self._report.find(small) is not None else None
        self._report.add(Figure(name, samples, unit=unit, peer=peer, note=note))


def name_of(what: str, guest_mb: int, dirty_mb: int) -> str:
    """Of a figure."""
    return f"{what}: {guest_mb} MB guest, {dirty_mb} MB changed"


async def _dirty(instance: MicroVMInstance, megabytes: int) -> None:
    """Have a process hold so much memory, written once."""
    process = await instance.agent.spawn(ProcessSpec(["/usr/bin/python3", "-c", _HOLD, str(megabytes)]))
    async for _, data in process.output():
        if b"held" in data:
            return
    raise RuntimeError(f"{megabytes} MiB could not be held: {await process.wait()}")


def own_mib(runtime: MicroVMRuntime, instance: MicroVMInstance) -> float:
    """What a guest has of its own, where all else is mapped from the files that it shares."""
    start = load_region(runtime.host.layout.home(instance.spec.sandbox_id))
    memory_mb = runtime.host.starter.memory_mb(instance.spec)
    return sum(end - first for first, end in changed(Region(instance.pid, start, memory_mb << 20))) * PAGE / (1 << 20)
