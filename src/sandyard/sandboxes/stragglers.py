"""What could not be destroyed at first is tried again until it is gone; its place stays taken till then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from sandyard.errors import SandyardError
from sandyard.runtimes.base import Runtime

log = structlog.get_logger("sandyard.stragglers")

RETRY_SECONDS = 15.0


class Stragglers:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._left: dict[str, Callable[[], None]] = {}
        self._some = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="stragglers")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def add(self, sandbox_id: str, when_gone: Callable[[], None]) -> None:
        self._left[sandbox_id] = when_gone
        self._some.set()

    async def _run(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(RETRY_SECONDS)
            for sandbox_id in list(self._left):
                await self._try(sandbox_id)
            if not self._left:
                self._some.clear()

    async def _try(self, sandbox_id: str) -> None:
        try:
            await self._runtime.destroy(sandbox_id)
        except SandyardError as error:
            log.error("sandbox still could not be destroyed", sandbox=sandbox_id, error=str(error))
        else:
            self._left.pop(sandbox_id)()
