"""The recently dead, so that whoever asks for one learns why it died."""

from __future__ import annotations

from collections import OrderedDict

from sandyard.errors import SandboxDied
from sandyard.store import DeathRecord, Store

KEPT_SECONDS = 24 * 3600.0
KEPT_COUNT = 10_000
FORGET_EVERY = 1000  # burials between two looks for what is too old


class Graveyard:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._buried = 0
        self._dead: OrderedDict[str, DeathRecord] = OrderedDict()

    async def load(self, now: float) -> None:
        await self._store.forget_dead(now - KEPT_SECONDS)
        for record in await self._store.dead(now - KEPT_SECONDS):
            self._remember(record)

    async def bury(self, record: DeathRecord) -> None:
        self._remember(record)
        await self._store.bury(record)
        self._buried += 1
        if self._buried % FORGET_EVERY == 0:
            await self._store.forget_dead(record.dead_at - KEPT_SECONDS)

    def get(self, sandbox_id: str, tenant: str | None = None) -> SandboxDied | None:
        """How a sandbox died, None if it is not known (or another tenant's, where one is given)."""
        record = self._dead.get(sandbox_id)
        if record is None or (tenant is not None and record.tenant != tenant):
            return None
        return SandboxDied(record.id, record.reason, record.detail)

    def _remember(self, record: DeathRecord) -> None:
        self._dead[record.id] = record
        while len(self._dead) > KEPT_COUNT:
            self._dead.popitem(last=False)
