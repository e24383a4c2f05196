"""How many sandboxes, running or paused, each tenant had when: the last hour, from when each began and ended."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sandyard.errors import SandboxDied
from sandyard.sandboxes import Sandbox, SandboxManager

KEPT_SECONDS = 3600.0
KEPT_COUNT = 20_000
STEP_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Load:
    """`at` in seconds since the epoch; `start_rate` in sandboxes per second over the step that ends there."""

    at: float
    sandboxes: int
    start_rate: float


@dataclass(frozen=True, slots=True)
class _Life:
    tenant: str
    start: float
    end: float


class LoadHistory:
    """Nothing is sampled: an idle server has no work with it."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._past: deque[_Life] = deque(maxlen=KEPT_COUNT)
        manager.on_death.append(self._died)

    def between(self, tenant: str, start: float, end: float) -> Sequence[Load]:
        """One figure each `STEP_SECONDS`, the oldest first."""
        lives = list(self._lives(tenant))
        starts, ends = sorted(life.start for life in lives), sorted(life.end for life in lives)
        return [_load(moment, starts, ends) for moment in _moments(start, end)]

    def _lives(self, tenant: str) -> Iterator[_Life]:
        yield from (life for life in self._past if life.tenant == tenant)
        for sandbox in self._manager.everyone(tenant):
            yield _Life(tenant, sandbox.started_at, math.inf)

    def _died(self, sandbox: Sandbox, _death: SandboxDied) -> None:
        now = time.time()
        self._past.append(_Life(sandbox.tenant, sandbox.started_at, now))
        while self._past and self._past[0].end < now - KEPT_SECONDS:
            self._past.popleft()


def _load(moment: float, starts: Sequence[float], ends: Sequence[float]) -> Load:
    begun = bisect_right(starts, moment)
    lately = begun - bisect_right(starts, moment - STEP_SECONDS)
    return Load(moment, begun - bisect_right(ends, moment), round(lately / STEP_SECONDS, 4))


def _moments(start: float, end: float) -> Iterator[float]:
    now = time.time()
    last, first = min(end, now), max(start, now - KEPT_SECONDS)
    count = int((last - first) // STEP_SECONDS) + 1 if last >= first else 0
    for step in reversed(range(count)):
        yield last - step * STEP_SECONDS
