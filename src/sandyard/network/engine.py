"""The thread in which sandboxes' bytes are passed on: however much they send, the server answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Engine:
    """An event loop in a thread of its own, from construction until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = Thread(target=self._run, name="sandyard-egress", daemon=True)
        self._thread.start()

    async def call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run `work` there, always to its end: who is cancelled meanwhile gets that afterwards."""
        waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        cancelled = False
        while not waiting.done():
            try:
                await asyncio.wait((waiting,))
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            waiting.exception()
            raise asyncio.CancelledError
        return waiting.result()

    async def stop(self) -> None:
        """Everything that was called must have been closed before. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
