"""`Idempotency-Key`: a create that is sent again, because its answer was lost, makes nothing new."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandyard.errors import BadRequest, Conflict
from sandyard.sandboxes import Sandbox

KEPT_SECONDS = 600.0
_KEY = re.compile(r"[a-z0-9-]{1,255}")


@dataclass(frozen=True, slots=True)
class _Create:
    at: float
    wanted: bytes  # its SHA-256
    made: asyncio.Future[Sandbox]


class Idempotency:
    """Remembers creates by tenant and key, for ten minutes or until they fail."""

    def __init__(self) -> None:
        self._creates: OrderedDict[tuple[str, str], _Create] = OrderedDict()

    async def create(
        self, tenant: str, key: str | None, make: Callable[[], Awaitable[Sandbox]], wanted: str = ""
    ) -> Sandbox:
        """The sandbox of this key, made now if there is none. `wanted` is the request in a comparable form.

        Raises what `make` raises, `BadRequest` for a malformed key, and `Conflict` where the key was used for
        another request."""
        if key is None:
            return await make()
        if not _KEY.fullmatch(key):
            raise BadRequest("Idempotency-Key must be 1 to 255 of a-z, 0-9 and -", field="Idempotency-Key")
        self._forget()
        name = (tenant, key)
        digest = hashlib.sha256(wanted.encode()).digest()
        known = self._creates.get(name)
        if known is None:
            known = self._creates[name] = _Create(time.monotonic(), digest, asyncio.ensure_future(make()))
            known.made.add_done_callback(lambda made: self._settle(name, made))
        elif known.wanted != digest:
            raise Conflict(
                f"Idempotency-Key '{key}' was used for another request", remedy="take a new key for this one"
            )
        return await asyncio.shield(known.made)

    def _settle(self, name: tuple[str, str], made: asyncio.Future[Sandbox]) -> None:
        if made.cancelled() or made.exception() is not None:
            self._creates.pop(name, None)

    def _forget(self) -> None:
        oldest = time.monotonic() - KEPT_SECONDS
        while self._creates and next(iter(self._creates.values())).at < oldest:
            self._creates.popitem(last=False)
