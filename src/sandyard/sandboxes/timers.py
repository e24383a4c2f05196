"""Deadlines by name, on one heap and one event-loop timer: ten thousand cost no more wake-ups than one."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

_IDLE = 64  # entries that no timer has any more


class Timers:
    """Named one-shot timers. Setting a name again replaces its deadline. Used from one event loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._due: dict[str, tuple[float, int, Callable[[], None]]] = {}
        self._serial = count()
        self._handle: asyncio.TimerHandle | None = None

    def set(self, name: str, delay: float, callback: Callable[[], None]) -> None:
        """Call `callback` once in `delay` seconds, unless the name is set again or cancelled before."""
        loop = asyncio.get_running_loop()
        entry = (loop.time() + max(delay, 0.0), next(self._serial), callback)
        self._due[name] = entry
        heapq.heappush(self._heap, (entry[0], entry[1], name))
        if len(self._heap) > 2 * len(self._due) + _IDLE:  # a deadline that is set anew again and again, and is far
            self._heap = [item for item in self._heap if self._valid(item)]
            heapq.heapify(self._heap)
        self._arm(loop)

    def cancel(self, name: str) -> None:
        self._due.pop(name, None)

    def clear(self) -> None:
        self._due.clear()
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._heap and not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._heap:
            self._handle = loop.call_at(self._heap[0][0], self._fire, loop)

    def _valid(self, item: tuple[float, int, str]) -> bool:
        due = self._due.get(item[2])
        return due is not None and due[1] == item[1]

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._handle = None
        try:
            while self._heap and self._heap[0][0] <= loop.time():
                item = heapq.heappop(self._heap)
                if self._valid(item):
                    self._due.pop(item[2])[2]()
        finally:
            self._arm(loop)
