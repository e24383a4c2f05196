"""How many sandboxes of one kind should have waited for what was asked lately."""

from __future__ import annotations

import math
from dataclasses import dataclass

BREATH = 0.25  # refilling waits until creates have been quiet for so long
_FIRST_GUESS = 1.0
_WEIGHT = 0.3  # of the newest measurement


@dataclass(slots=True)
class Demand:
    """Not an average: the most that was ever short, which fades.

    `backlog` is what would be missing of a stock that never runs out. A take adds one; a pause gives back what can
    be made again in it, one every `make_seconds` (measured; exponentially weighted), from `BREATH` on. Its maximum
    is the stock with which nobody would have waited; it is halved each `half_life` without a burst as large. All
    times are of one monotonic clock, in seconds."""

    half_life: float
    make_seconds: float = _FIRST_GUESS
    backlog: float = 0.0
    peak: int = 0
    peak_at: float = 0.0
    last_take: float = -1e9

    def taken(self, now: float) -> None:
        self.backlog = self._left(now) + 1
        self.last_take = now
        if self.backlog >= self._faded(now):
            self.peak, self.peak_at = math.ceil(self.backlog), now

    def made(self, seconds: float) -> None:
        """One was made in so long."""
        self.make_seconds += _WEIGHT * (max(seconds, 0.001) - self.make_seconds)

    def wanted(self, now: float) -> int:
        """How many should wait now."""
        return int(self._faded(now))

    def idle(self, now: float) -> float:
        """Seconds since anybody wanted one."""
        return now - self.last_take

    def join(self, other: Demand) -> None:
        """Go on where another one of the same half-life stood."""
        if other.last_take > self.last_take:
            self.last_take, self.backlog, self.make_seconds = other.last_take, other.backlog, other.make_seconds
        if other.peak > self.peak:
            self.peak, self.peak_at = other.peak, other.peak_at

    def _left(self, now: float) -> float:
        return max(self.backlog - max(now - self.last_take - BREATH, 0.0) / self.make_seconds, 0.0)

    def _faded(self, now: float) -> float:
        halvings = int((now - self.peak_at) / self.half_life)
        return self.peak / 2**halvings if halvings < 64 else 0.0
