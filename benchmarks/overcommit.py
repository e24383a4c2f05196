"""Many microVMs of one base: the memory they are promised, against what the host gives them.

What they share is counted once (proportional set sizes), QEMU is counted with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Figure, Report
from benchmarks.microvm import own_mib
from sandyard.config import Settings
from sandyard.guest.base import ProcessSpec
from sandyard.images.templates import TemplateStore
from sandyard.runtimes.base import Resources, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.room import host_memory

GUESTS = 24
GUEST_MB = 512
TAKEN_MB = 64
_SPARE_MB = 2048  # that stay free on the host
_EACH_MB = 160  # what one may come to meanwhile
_REPORTED = 8.0  # seconds in which a guest has told what it has free
_AT_ONCE = 2
_TAKE = "bytearray(b'x') * (int(__import__('sys').argv[1]) << 20)"


@dataclass(frozen=True, slots=True)
class Weight:
    """MiB of all guests together: their own pages, QEMU's, and what is shared, once."""

    own: float
    engine: float
    shared: float

    @property
    def all(self) -> float:
        return self.own + self.engine + self.shared

    def __str__(self) -> str:
        return f"guests' own pages {self.own:.0f}, QEMU's {self.engine:.0f}, shared {self.shared:.0f}"


async def overcommit(report: Report, settings: Settings, rounds: int) -> None:
    """Fewer guests with few rounds, or where the host has little memory."""
    runtime = MicroVMRuntime(settings)
    count = min(GUESTS, 2 * rounds, (host_memory()[1] - _SPARE_MB) // _EACH_MB)
    probe = await runtime.probe()
    if not probe.works or count < 2:
        report.skip("microVM overcommit", probe.detail if not probe.works else "the host has too little memory for it")
        return
    try:
        await _measure(report, runtime, settings, count)
    finally:
        for sandbox_id in await runtime.list():
            await runtime.destroy(sandbox_id)
        await runtime.close()


async def _measure(report: Report, runtime: MicroVMRuntime, settings: Settings, count: int) -> None:
    rootfs = TemplateStore(settings).get("base").rootfs
    promised = f"memory promised to {count} microVMs"
    report.add(Figure(promised, [count * GUEST_MB], unit="MiB", note="the sum of their limits"))
    guests: list[MicroVMInstance] = []
    for number in range(count):
        spec = SandboxSpec(f"many{number}", rootfs, Resources(memory_mb=GUEST_MB, disk_mb=256))
        made = await runtime.create(spec)
        assert isinstance(made, MicroVMInstance)
        guests.append(made)
    for name, argv in (
        ("idle, after a command each", ["/bin/true"]),
        (f"after each took {TAKEN_MB} MB and freed it", ["/usr/bin/python3", "-c", _TAKE, str(TAKEN_MB)]),
    ):
        for at in range(0, count, _AT_ONCE):
            await asyncio.gather(*(_run(guest, argv) for guest in guests[at : at + _AT_ONCE]))
        await asyncio.sleep(_REPORTED)
        weight = await asyncio.to_thread(_weigh, runtime, guests)
        figure = Figure(f"memory given to them, {name}", [weight.all], unit="MiB", peer=promised, note=str(weight))
        report.add(figure)


async def _run(guest: MicroVMInstance, argv: Sequence[str]) -> None:
    process = await guest.agent.spawn(ProcessSpec(argv))
    async for _ in process.output():
        pass
    status = await process.wait()
    if status.code != 0:
        raise RuntimeError(f"{argv[0]} in {guest.spec.sandbox_id}: {status}")


def _weigh(runtime: MicroVMRuntime, guests: Sequence[MicroVMInstance]) -> Weight:
    own = sum(own_mib(runtime, guest) for guest in guests)
    sizes = [_proportional(guest.pid) for guest in guests]
    anonymous = sum(size["Pss_Anon"] for size in sizes)
    return Weight(own, anonymous - own, sum(size["Pss"] for size in sizes) - anonymous)


def _proportional(pid: int) -> dict[str, float]:
    """MiB by kind."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.partition(":")[0]: int(line.split()[1]) / 1024 for line in lines}
