"""Places by memory: what a sandbox may take of the host, and what those take that are starting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sandyard.config import Settings
from sandyard.errors import BadRequest, CapacityError
from sandyard.runtimes.base import Resources
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import admission
from sandyard.sandboxes.admission import Admission


class Machines(MemoryRuntime):
    above_mb = 288
    start_mb = 100


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
