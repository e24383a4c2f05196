"""Whose turn it is with a sandbox: one piece of work at a time for each, and all of it is over when its runtime is
closed, so that none is left half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import structlog

from sandyard.errors import SandboxError

log = structlog.get_logger("sandyard.microvm")


class Turns:
    """Used from one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._at_work: dict[str, asyncio.Task[object] | None] = {}
        self._over = asyncio.Event()
        self._closing = False

    @asynccontextmanager
    async def of(self, sandbox_id: str) -> AsyncIterator[None]:
        """Wait for one's turn, and have it. Raises `SandboxError` where none is given any more."""
        async with self._locks.setdefault(sandbox_id, asyncio.Lock()):
            if self._closing:
                raise SandboxError(f"sandbox {sandbox_id} is let go of: its server stops")
            self._at_work[sandbox_id] = asyncio.current_task()
            try:
                yield
            finally:
                del self._at_work[sandbox_id]
                self._over.set()

    async def end(self, patience: float) -> None:
        """Call off what is under way, and wait until it has come to its end or is undone, whichever it takes; not
        longer than `patience` seconds."""
        self._closing = True
        try:
            for task in set(self._at_work.values()) - {asyncio.current_task()}:
                if task is not None:
                    task.cancel()
            async with asyncio.timeout(patience):
                while self._at_work:
                    self._over.clear()
                    await self._over.wait()
        except TimeoutError:
            log.error("a server stops in the middle of what takes too long", sandboxes=sorted(self._at_work))
        finally:
            self._closing = False
