"""A guest that QEMU stopped because the host had no room for what it wrote: it is tried again until there is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from sandyard.errors import GuestError, SandboxError

log = structlog.get_logger("sandyard.microvm")

STALLED = "io-error"
"""QEMU's name for the state of such a guest."""
PAUSE = 5.0
Retry = Callable[[], Awaitable[bool]]


class Stall:
    """Of one sandbox. `retry` lets the guest try again; it answers whether the guest stood still until then."""

    def __init__(self, sandbox_id: str, retry: Retry) -> None:
        self._sandbox_id = sandbox_id
        self._retry = retry
        self._again = False
        self._task: asyncio.Task[None] | None = None

    @property
    def lasts(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self) -> None:
        """It was stopped, for the first time or once more."""
        self._again = True
        if not self.lasts:
            log.error("the host's disk takes no more: a guest stands still until it does", sandbox=self._sandbox_id)
            self._task = asyncio.ensure_future(self._last())

    def end(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _last(self) -> None:
        said = ""
        while self._again:  # a guest that went on may have been stopped again at once: that is looked at once more
            self._again = False
            await asyncio.sleep(PAUSE)
            try:
                self._again = await self._retry() or self._again
            except (SandboxError, GuestError) as error:
                if str(error) != said:
                    log.warning("a guest stands still, and cannot go on", sandbox=self._sandbox_id, error=str(error))
                said, self._again = str(error), True
        log.info("a guest that stood still goes on", sandbox=self._sandbox_id)
