"""Prometheus metrics of one server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sandyard.errors import SandboxDied
from sandyard.network.runtime import NetworkedRuntime
from sandyard.sandboxes import Sandbox, SandboxManager, State

_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Counts:
    """Sandboxes now, and creates since the server started. A refused create (4xx) is none that failed."""

    running: Sequence[Sandbox]
    paused: Sequence[Sandbox]
    starting: int
    created: int
    failed: int


class _Places(Collector):
    """Read from the manager when asked, so that they are never stale."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        states = [sandbox.state for sandbox in self._manager.everyone()]
        figures = {
            "running": states.count(State.RUNNING),
            "paused": states.count(State.PAUSED),
            "starting": self._manager.starting,
            "warm": self._manager.pool.ready,
            "places": self._manager.admission.max_count,
        }
        for name, value in figures.items():
            yield GaugeMetricFamily(f"sandyard_sandboxes_{name}", f"Sandboxes: {name}", value=value)
        yield from self._memory()
        pool = self._manager.pool
        yield GaugeMetricFamily("sandyard_pool_aim", "Warm sandboxes that are to wait", value=pool.aim)
        yield GaugeMetricFamily("sandyard_pool_making", "Warm sandboxes that are being made", value=pool.starting)
        yield CounterMetricFamily("sandyard_pool_ended", "Warm sandboxes that gave way unused", value=pool.evicted)
        if isinstance(self._manager.runtime, NetworkedRuntime):
            for name, value in self._manager.runtime.slots.counts().items():
                yield GaugeMetricFamily(f"sandyard_network_{name}", f"Networks of sandboxes: {name}", value=value)

    def _memory(self) -> Iterator[Metric]:
        """What sandboxes may take of the host's memory, against what they have."""
        admission, taken = self._manager.admission, self._manager.runtime.host_memory()
        figures = {"promised": (admission.memory_mb << 20, "what running sandboxes may take together")}
        if admission.budget_mb:
            figures["budget"] = (admission.budget_mb << 20, "what they may be promised together")
        if taken is not None:
            figures["used"] = (taken.bytes - taken.cache, "what they have, without the cache of files")
            figures["cache"] = (taken.cache, "cache of files for them, which goes when it is needed")
        if ready := self._manager.runtime.ready_bytes():
            figures["ready"] = (ready, "what stands ready for the next starts has, part of what is used")
        for name, (value, what) in figures.items():
            yield GaugeMetricFamily(f"sandyard_memory_{name}_bytes", f"Memory of the host: {what}", value=value)


class Metrics:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._created_count = self._failed_count = 0
        self._registry = CollectorRegistry()
        self._registry.register(_Places(manager))
        self._creates = Histogram(
            "sandyard_create_seconds", "Time to make a sandbox", ["kind"], registry=self._registry, buckets=_BUCKETS
        )
        self._deaths = Counter("sandyard_deaths", "Sandboxes that died", ["reason"], registry=self._registry)
        self._refused = Counter("sandyard_refused", "Creates refused", ["status"], registry=self._registry)
        manager.on_create.append(self._created)
        manager.on_death.append(self._died)

    def counts(self) -> Counts:
        sandboxes = self._manager.everyone()
        return Counts(
            running=[s for s in sandboxes if s.state is not State.PAUSED],
            paused=[s for s in sandboxes if s.state is State.PAUSED],
            starting=self._manager.starting,
            created=self._created_count,
            failed=self._failed_count,
        )

    def refused(self, status: int) -> None:
        self._failed_count += status >= 500
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _created(self, kind: str, seconds: float) -> None:
        self._created_count += 1
        self._creates.labels(kind).observe(seconds)

    def _died(self, _sandbox: Sandbox, death: SandboxDied) -> None:
        self._deaths.labels(death.reason.value).inc()
