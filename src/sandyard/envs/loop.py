"""An event loop in a thread of its own, for callers who have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from sandyard.errors import Conflict

T = TypeVar("T")
_JOIN_TIMEOUT = 30.0


class LoopThread:
    """Runs coroutines for threads other than its own. `close` is idempotent; nothing runs after it."""

    def __init__(self, name: str = "sandyard-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Its result. A caller that is interrupted cancels it, and so do `timeout` seconds: `TimeoutError`.
        Raises `Conflict` when closed."""
        if self.closed:
            work.close()
            raise Conflict("the loop is closed")
        future = asyncio.run_coroutine_threadsafe(_bounded(work, timeout), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self.closed:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_TIMEOUT)
        if not self._thread.is_alive():
            self._loop.close()


async def _bounded(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    async with asyncio.timeout(timeout):
        return await work
