"""Places by memory: what a sandbox may take of the host, and what those take that are starting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandyard.config import SandboxSettings, Settings
from sandyard.errors import BadRequest, CapacityError
from sandyard.runtimes.base import Resources
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import admission
from sandyard.sandboxes.admission import Admission


class Machines(MemoryRuntime):
    above_mb = 288
    start_mb = 100
    ready_mb = 0

    def ready_bytes(self) -> int:
        return self.ready_mb << 20

    async def rest(self) -> None:
        self.ready_mb = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("sandyard.sandboxes.admission.time.monotonic", lambda: now[0])
    return now


def host(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr(admission, "host_memory", lambda: (total, available))


def test_what_a_machine_takes_beside_its_memory_is_promised_too(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    host(monkeypatch, 9 * 1024, 8 * 1024)  # a budget of 64 GiB
    size = Resources(memory_mb=512)
    machines, containers = Admission(Settings(), Machines()), Admission(Settings(), MemoryRuntime())
    assert (containers.max_count, machines.max_count) == (65536 // 512, 65536 // 800)
    for _ in range(machines.max_count):
        clock[0] += 10
        machines.take(size)
    assert machines.memory_mb == machines.max_count * 800
    with pytest.raises(CapacityError, match="800 MiB more would pass 65536 MiB"):
        machines.take(size)
    machines.release(size)
    machines.take(size)


def test_a_machine_that_is_more_than_the_host_is_refused_for_good(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    host(monkeypatch, 4096, 4000)
    runtime = Machines()
    runtime.capabilities = replace(runtime.capabilities, shared_kernel=False)
    machines, containers = Admission(Settings(), runtime), Admission(Settings(), MemoryRuntime())
    machines.check(Resources(memory_mb=4096 - 288))
    with pytest.raises(BadRequest, match=r"4000 MiB of memory is more than this host can have, 3808 MiB; ask for less"):
        machines.check(Resources(memory_mb=4000))
    assert "more than this host" in (machines.shortage(Resources(memory_mb=4000)) or "")
    containers.check(Resources(memory_mb=100_000))
    assert containers.shortage(Resources(memory_mb=8000)) is None


def test_starts_under_way_are_not_given_the_same_memory(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    host(monkeypatch, 8 * 1024, 256 + 250)
    machines = Admission(Settings(), Machines())
    for _ in range(3):
        machines.take(Resources(memory_mb=64))
    with pytest.raises(CapacityError, match="506 MiB of memory left, of which 300 MiB are for starts under way"):
        machines.take(Resources(memory_mb=64))
    clock[0] += 6  # what they took shows
    for _ in range(3):
        machines.hold(Resources(memory_mb=64))  # these live already
    machines.take(Resources(memory_mb=64))
    containers = Admission(Settings(), MemoryRuntime())
    for _ in range(50):
        containers.take(Resources(memory_mb=64))


async def test_what_stands_ready_counts_and_gives_way(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    host(monkeypatch, 2 * 1024, 2 * 1024)  # a budget of 8 GiB
    size, runtime = Resources(memory_mb=1760), Machines()  # four fit
    machines = Admission(Settings(), runtime)
    for _ in range(3):
        clock[0] += 10
        machines.take(size)
    clock[0] += 10
    assert not await machines.let_go(size)  # there is nothing
    runtime.ready_mb = 150
    with pytest.raises(CapacityError, match="6144 MiB, 150 MiB stand ready for starts, and 2048 MiB more would pass"):
        machines.take(size)
    assert await machines.let_go(size)
    machines.take(size)
    clock[0] += 10
    runtime.ready_mb = 150
    assert await machines.let_go(size)  # it was worth a try
    assert not await machines.let_go(size)
    machines.release(size)
    runtime.ready_mb = 50
    assert not await machines.let_go(Resources(memory_mb=64))  # which fits


async def test_what_stands_ready_gives_way_where_the_host_is_short(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    host(monkeypatch, 8 * 1024, 200)
    runtime = Machines()
    runtime.ready_mb = 100
    machines = Admission(Settings(), runtime)
    size = Resources(memory_mb=64)
    assert machines.shortage(size) == "the host has only 200 MiB of memory left"
    host(monkeypatch, 8 * 1024, 300)  # with what goes
    assert await machines.let_go(size)
    machines.take(size)  # at once
    few = Admission(Settings(sandbox=SandboxSettings(max_count=1)), runtime)
    few.take(size)
    runtime.ready_mb = 100
    assert not await few.let_go(size)  # that is no help
    assert runtime.ready_mb == 100
