"""`Idempotency-Key`: a create that is sent again, because its answer was lost, makes nothing new."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from sandyard.errors import BadRequest
from sandyard.sandboxes import Sandbox

KEPT_SECONDS = 600.0
_KEY = re.compile(r"[a-z0-9-]{1,255}")


class Idempotency:
    """Remembers creates by tenant and key, for ten minutes or until they fail."""

    def __init__(self) -> None:
        self._creates: OrderedDict[tuple[str, str], tuple[float, asyncio.Future[Sandbox]]] = OrderedDict()

    async def create(self, tenant: str, key: str | None, make: Callable[[], Awaitable[Sandbox]]) -> Sandbox:
        """The sandbox of this key, made now if there is none. Raises what `make` raises, and `BadRequest`."""
        if key is None:
            return await make()
        if not _KEY.fullmatch(key):
            raise BadRequest("Idempotency-Key must be 1 to 255 of a-z, 0-9 and -", field="Idempotency-Key")
        self._forget()
        name = (tenant, key)
        known = self._creates.get(name)
        if known is None:
            known = self._creates[name] = (time.monotonic(), asyncio.ensure_future(make()))
            known[1].add_done_callback(lambda made: self._settle(name, made))
        return await asyncio.shield(known[1])

    def _settle(self, name: tuple[str, str], made: asyncio.Future[Sandbox]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._creates.pop(name, None)

    def _forget(self) -> None:
        oldest = time.monotonic() - KEPT_SECONDS
        while self._creates and next(iter(self._creates.values()))[0] < oldest:
            self._creates.popitem(last=False)
