"""What is kept of a command's output: a bounded head of each stream, and a word when it floods."""

from __future__ import annotations

import asyncio

from sandyard.envs.base import Execution

FLOOD_FACTOR = 16


class StreamTap:
    """Keeps the first `limit` characters; counts the rest."""

    def __init__(self, limit: int, flooded: asyncio.Event) -> None:
        self._limit = limit
        self._flooded = flooded
        self._parts: list[str] = []
        self.seen = 0

    def add(self, text: str) -> None:
        room = self._limit - self.seen
        if room > 0:
            self._parts.append(text[:room])
        self.seen += len(text)
        if self.seen > self._limit * FLOOD_FACTOR:
            self._flooded.set()

    def text(self) -> str:
        kept = "".join(self._parts)
        cut = self.seen - len(kept)
        return f"{kept}\n[... {cut} more characters were not kept ...]\n" if cut > 0 else kept


class OutputTap:
    """Both streams of one command. `flooded` is set when a stream passed `FLOOD_FACTOR` limits."""

    def __init__(self, limit: int) -> None:
        self.flooded = asyncio.Event()
        self.stdout = StreamTap(limit, self.flooded)
        self.stderr = StreamTap(limit, self.flooded)

    def execution(self, exit_code: int | None, *, timed_out: bool, duration: float) -> Execution:
        stderr = self.stderr.text()
        if self.flooded.is_set():
            stderr += "\n[killed: it printed without end]\n"
        return Execution(self.stdout.text(), stderr, exit_code, timed_out, duration)
