"""Samples, medians and ratios: how a figure is taken and printed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Figure:
    """One measured thing. `samples` in `unit`; lower is better unless `higher_is_better`.

    `peer` names the figure of the same run that this one is set against."""

    name: str
    samples: Sequence[float]
    unit: str = "ms"
    peer: str | None = None
    higher_is_better: bool = False
    budget: float | None = None  # in `unit`, for the median
    note: str = ""

    @property
    def within_budget(self) -> bool | None:
        """None where there is no budget."""
        if self.budget is None:
            return None
        return self.p50 >= self.budget if self.higher_is_better else self.p50 <= self.budget

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)

    @property
    def p95(self) -> float:
        """What 95 % of the samples are better than or as good as."""
        ordered = sorted(self.samples)
        if self.higher_is_better:
            ordered.reverse()
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


@dataclass(slots=True)
class Report:
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # "what: why"

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")

    def find(self, name: str | None) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)

    def is_peer(self, figure: Figure) -> bool:
        """Whether it is only there for others to be set against: nobody's promise."""
        return figure.peer is None and figure.budget is None

    def ratio(self, figure: Figure) -> float | None:
        """Ours to the peer's median: below 1 is better, whichever way the unit points."""
        peer = self.find(figure.peer)
        if peer is None or not figure.p50 or not peer.p50:
            return None
        return peer.p50 / figure.p50 if figure.higher_is_better else figure.p50 / peer.p50


def timed(run: Callable[[], object], rounds: int, warmup: int = 1) -> list[float]:
    """Milliseconds of each of `rounds` calls, after `warmup` calls that do not count."""
    samples = []
    for index in range(rounds + warmup):
        started = time.perf_counter()
        run()
        if index >= warmup:
            samples.append((time.perf_counter() - started) * 1e3)
    return samples


async def timed_async(run: Callable[[], Awaitable[object]], rounds: int, warmup: int = 1) -> list[float]:
    """The same for a coroutine function."""
    samples = []
    for index in range(rounds + warmup):
        started = time.perf_counter()
        await run()
        if index >= warmup:
            samples.append((time.perf_counter() - started) * 1e3)
    return samples
