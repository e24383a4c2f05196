"""Work that is brought to its end also when whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def finish(work: Awaitable[_T]) -> _T:
    """Await `work` to its end even when cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # seen; the caller is leaving and gets the cancellation
        raise


async def ended(work: Callable[..., _T], *args: object) -> _T:
    """What `work(*args)` gives or raises, from a thread. Unlike with `asyncio.to_thread`, whoever is cancelled goes
    on only when the thread has ended: what it works on (a descriptor, a file) can be closed then."""
    run = functools.partial(contextvars.copy_context().run, work, *args)
    return await finish(asyncio.get_running_loop().run_in_executor(None, run))
