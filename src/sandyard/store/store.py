"""The server's memory across restarts: sandboxes, the recently dead, leases and API keys."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from sandyard.errors import DeathReason
from sandyard.store.catalog import CatalogTables
from sandyard.store.database import Database
from sandyard.store.records import DeathRecord, LeaseRecord, SandboxRecord
from sandyard.store.schema import api_keys, leases, sandboxes

RUNNING, PAUSED, DEAD = "running", "paused", "dead"


class Store:
    """Every method commits before it returns and may raise `HostError` when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.catalog = CatalogTables(database)

    async def open(self) -> None:
        await self._database.migrate()

    async def close(self) -> None:
        await self._database.close()

    async def add_sandbox(self, record: SandboxRecord) -> None:
        values = {name: getattr(record, name) for name in SandboxRecord.__slots__}
        await self._execute(sandboxes.insert(), {**values, "layers": list(record.layers)})

    async def set_end(self, sandbox_id: str, end_at: float) -> None:
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(end_at=end_at))

    async def set_network(self, sandbox_id: str, network: Mapping[str, Any]) -> None:
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(network=dict(network)))

    async def set_paused(self, sandbox_id: str, at: float, mode: str) -> None:
        values = {"state": PAUSED, "paused_at": at, "pause_mode": mode}
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(values))

    async def set_running(self, sandbox_id: str, end_at: float) -> None:
        """It was paused, and lives until `end_at` now."""
        values = {"state": RUNNING, "paused_at": None, "pause_mode": None, "end_at": end_at}
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(values))

    async def set_policy(self, sandbox_id: str, on_timeout: str, memory: bool, auto_resume: bool) -> None:
        values = {"on_timeout": on_timeout, "pause_memory": memory, "auto_resume": auto_resume}
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(values))

    async def set_extension(self, sandbox_id: str, extension: Mapping[str, Any]) -> None:
        values = {"extension": dict(extension)}
        await self._execute(sandboxes.update().where(sandboxes.c.id == sandbox_id).values(values))

    async def bury(self, record: DeathRecord) -> None:
        """Mark a sandbox dead; one that was never recorded stays unknown."""
        values = {
            "state": DEAD,
            "dead_at": record.dead_at,
            "death_reason": record.reason.value,
            "death_detail": record.detail,
            "envs": {},
        }
        await self._execute(sandboxes.update().where(sandboxes.c.id == record.id).values(values))

    async def living(self) -> Sequence[SandboxRecord]:
        """The running and the paused."""
        query = sandboxes.select().where(sandboxes.c.state.in_((RUNNING, PAUSED)))
        rows = await self._database.run(lambda c: c.execute(query).mappings().all())
        return [SandboxRecord(**{name: row[name] for name in SandboxRecord.__slots__}) for row in rows]

    async def dead(self, since: float) -> Sequence[DeathRecord]:
        query = sandboxes.select().where(sandboxes.c.state == DEAD, sandboxes.c.dead_at >= since)
        rows = await self._database.run(
            lambda c: c.execute(query.order_by(sandboxes.c.dead_at.desc()).limit(10_000)).mappings().all()
        )
        return [
            DeathRecord(
                id=row["id"],
                tenant=row["tenant"],
                reason=DeathReason(row["death_reason"]),
                detail=row["death_detail"] or "",
                dead_at=row["dead_at"],
            )
            for row in reversed(rows)
        ]

    async def forget_dead(self, before: float) -> None:
        await self._execute(sandboxes.delete().where(sandboxes.c.state == DEAD, sandboxes.c.dead_at < before))

    async def add_lease(self, record: LeaseRecord) -> None:
        await self._execute(leases.insert(), asdict(record))

    async def drop_lease(self, lease_id: str) -> None:
        await self._execute(leases.delete().where(leases.c.id == lease_id))

    async def leases(self) -> Sequence[LeaseRecord]:
        rows = await self._database.run(lambda c: c.execute(leases.select()).mappings().all())
        return [LeaseRecord(**dict(row)) for row in rows]

    async def add_key(self, key_hash: str, tenant: str, name: str) -> None:
        """Remember a key by its hash; adding it again changes nothing."""

        def work(connection: sa.Connection) -> None:
            known = connection.execute(sa.select(api_keys.c.tenant).where(api_keys.c.key_hash == key_hash)).scalar()
            if known is None:
                values = {"key_hash": key_hash, "tenant": tenant, "name": name, "created_at": time.time()}
                connection.execute(api_keys.insert(), values)

        await self._database.run(work)

    async def drop_key(self, key_hash: str) -> None:
        await self._execute(api_keys.delete().where(api_keys.c.key_hash == key_hash))

    async def tenant_of(self, key_hash: str) -> str | None:
        query = sa.select(api_keys.c.tenant).where(api_keys.c.key_hash == key_hash)
        return await self._database.run(lambda c: c.execute(query).scalar())

    async def _execute(self, statement: sa.Executable, values: Mapping[str, Any] | None = None) -> None:
        def work(connection: sa.Connection) -> None:
            connection.execute(statement, values)

        await self._database.run(work)
