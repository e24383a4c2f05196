"""At start: what an earlier server left behind is adopted if it was promised to somebody, else destroyed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import DeathReason, SandyardError
from sandyard.sandboxes.model import Sandbox
from sandyard.store import DeathRecord, SandboxRecord

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.recovery")

AT_ONCE = 8


async def recover(manager: SandboxManager) -> Sequence[Sandbox]:
    """The sandboxes that still live, after everything else is gone and buried.

    A warm sandbox was promised to nobody, so it is destroyed too."""
    records = {record.id: record for record in await manager.store.living()}
    present = set(await manager.runtime.list())
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(sandbox_id: str) -> Sandbox | None:
        async with gate:
            return await _one(manager, sandbox_id, records.get(sandbox_id), sandbox_id in present)

    found = await asyncio.gather(*(one(sandbox_id) for sandbox_id in present | records.keys()))
    return [sandbox for sandbox in found if sandbox is not None]


async def _one(manager: SandboxManager, sandbox_id: str, record: SandboxRecord | None, present: bool) -> Sandbox | None:
    doom = _doom(manager, record)
    if record is not None and present and doom is None:
        instance = await manager.runtime.adopt(sandbox_id)
        if instance is not None:
            return Sandbox.adopted(record, instance)
    reason, detail = doom or (DeathReason.HOST, "it did not outlive a restart of the server")
    if present:
        await _destroy(manager, sandbox_id)
    if record is not None:
        await manager.graveyard.bury(DeathRecord(sandbox_id, record.tenant, reason, detail, time.time()))
    return None


def _doom(manager: SandboxManager, record: SandboxRecord | None) -> tuple[DeathReason, str] | None:
    """Why a recorded sandbox must not live on; None if it may."""
    if record is None:
        return DeathReason.HOST, "unknown"
    if record.end_at <= time.time():
        return DeathReason.TIMEOUT, "its lifetime ended while the server was down"
    if record.lease_id is not None and record.lease_id not in manager.leases:
        return DeathReason.LEASE, "its lease is gone"
    return None


async def _destroy(manager: SandboxManager, sandbox_id: str) -> None:
    try:
        await manager.runtime.destroy(sandbox_id)
    except SandyardError as error:
        log.error("leftover could not be destroyed", sandbox=sandbox_id, error=str(error))
        manager.straggle(sandbox_id)
