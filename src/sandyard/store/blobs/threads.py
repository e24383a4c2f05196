"""Blocking work in threads that nobody leaves behind."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def ended(work: Callable[..., _T], *args: object) -> _T:
    """What `work(*args)` gives or raises, from a thread. Unlike with `asyncio.to_thread`, whoever is cancelled goes
    on only when the thread has ended: what it works on (a descriptor, a file) can be closed then."""
    run = functools.partial(contextvars.copy_context().run, work, *args)
    future = asyncio.get_running_loop().run_in_executor(None, run)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # who is cancelled hears of that alone
        raise cancelled
    return future.result()
