"""A guest that is to run and stands still: QEMU stopped it because the host had no room for what it wrote, or it did
not go on after a snapshot. It is tried again until it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sandyard.errors import HostFull, SandyardError

log = structlog.get_logger("sandyard.microvm")

STALLED = "io-error"
"""QEMU's name for the state of one that the host has no room for."""
FULL = "the host's disk takes no more: a guest stands still until it does"
NOT_ON = "a guest does not go on: it is tried again until it does"
PAUSE = 5.0
_SAID_MAX = 3
Retry = Callable[[], Awaitable[bool]]


class Stall:
    """Of one sandbox. `retry` lets the guest try again; it answers whether the guest stood still until then. `full` is
    set while that is for want of room."""

    def __init__(self, sandbox_id: str, retry: Retry) -> None:
        self.full = asyncio.Event()
        self._sandbox_id = sandbox_id
        self._retry = retry
        self._again = False
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    @property
    def lasts(self) -> bool:
        return self._task is not None and not self._task.done()

    def error(self) -> HostFull:
        message = f"sandbox {self._sandbox_id} stands still: the host's disk has no room for what it writes"
        return HostFull(message, remedy="free space below paths.state and try again: it has lost nothing")

    def begin(self, why: str = FULL) -> None:
        """It was stopped, for the first time or once more."""
        if self._ended:
            return
        self._again = True
        if why == FULL:
            self.full.set()
        if not self.lasts:
            log.error(why, sandbox=self._sandbox_id)
            self._task = asyncio.ensure_future(self._last())

    def end(self) -> None:
        """It is dead, or let go of. Idempotent."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()

    async def _last(self) -> None:
        said: set[str] = set()  # what a guest says comes to no end
        while self._again:  # a guest that went on may have been stopped again at once: that is looked at once more
            self._again = False
            await asyncio.sleep(PAUSE)
            try:
                self._again = await self._retry() or self._again
            except SandyardError as error:
                if str(error) not in said and len(said) < _SAID_MAX:
                    log.warning("a guest stands still, and cannot go on", sandbox=self._sandbox_id, error=str(error))
                    said.add(str(error))
                self._again = True
        log.info("a guest that stood still goes on", sandbox=self._sandbox_id)
