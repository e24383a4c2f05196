"""A worker's place in the pool: who is there now, and who comes after."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sandyard.envs.pool.base import Worker, WorkerLost
from sandyard.errors import Conflict

logger = logging.getLogger(__name__)


class Seat:
    """Holds at most one worker. `generation` grows with each; episodes of an earlier one are lost."""

    def __init__(self, number: int, start: Callable[[], Awaitable[Worker]]) -> None:
        self.number = number
        self.generation = 0
        self._start = start
        self._worker: Worker | None = None
        self._closed = False
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that holds the envs, while there is one."""
        return self._worker.opened.pid if self._worker is not None else None

    async def worker(self) -> tuple[Worker, int]:
        """The worker and its generation; started if there is none. Raises what starting raises."""
        async with self._lock:
            if self._closed:
                raise Conflict("the pool is closed")
            if self._worker is None:
                self._worker = await self._start()
                self.generation += 1
            return self._worker, self.generation

    async def occupant(self, generation: int) -> Worker | None:
        """The worker of that generation, if it is still here."""
        async with self._lock:
            return self._worker if generation == self.generation else None

    async def discard(self, generation: int, why: Exception) -> None:
        """The worker of that generation is no use any more; the next call starts another."""
        async with self._lock:
            if self._worker is None or generation != self.generation:
                return  # somebody else has seen it, too
            worker, self._worker = self._worker, None
            worker.kill()
            logger.warning("worker %d of the pool (pid %d) is replaced: %s", self.number, worker.opened.pid, why)

    async def close(self) -> None:
        """Let the worker close its envs, then end it. For good."""
        async with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            await worker.close()
        except WorkerLost as lost:
            logger.warning("worker %d of the pool (pid %d) did not close: %s", self.number, worker.opened.pid, lost)
        finally:
            worker.kill()
