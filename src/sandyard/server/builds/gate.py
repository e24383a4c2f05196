"""Who builds next: tenants take turns, whatever each of them has queued."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from weakref import WeakValueDictionary


class Gate:
    """`at_once` places; one tenant holds at most all but one of them (one of one). Used from one event loop."""

    def __init__(self, at_once: int) -> None:
        self._places = asyncio.Semaphore(at_once)
        self._each = max(at_once - 1, 1)
        self._tenants: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def place(self, tenant: str, on_wait: Callable[[], None]) -> AsyncIterator[None]:
        """Hold a place; `on_wait` is called first where there is none at once.

        A tenant's own places come before everyone's: so there wait, in their order, no more of each than
        it may hold, and who comes with one is not behind another's whole queue."""
        own = self._tenants.get(tenant) or asyncio.Semaphore(self._each)
        self._tenants[tenant] = own  # until nothing of the tenant holds it or waits
        if own.locked() or self._places.locked():
            on_wait()
        async with own, self._places:
            yield
