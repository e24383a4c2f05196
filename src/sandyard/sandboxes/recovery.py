"""At start: what an earlier server left behind is adopted if it was promised to somebody, else destroyed.

A move between running and paused that the earlier server did not finish is finished, in the direction that
loses nothing: what was frozen but not recorded as paused runs, what was halted or suspended is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import DeathReason, HostError, HostFull, SandyardError
from sandyard.sandboxes.halted import HaltedInstance
from sandyard.sandboxes.model import OnTimeout, PauseMode, Sandbox, State
from sandyard.sandboxes.pausing import FULL_SECONDS
from sandyard.store import DeathRecord, SandboxRecord

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.recovery")

AT_ONCE = 8


async def recover(manager: SandboxManager) -> Sequence[Sandbox]:
    """The sandboxes that still live, after everything else is gone and buried.

    A warm sandbox was promised to nobody, so it is destroyed too."""
    records = {record.id: record for record in await manager.store.living()}
    halted = set(await manager.runtime.halted())
    suspended = set(await manager.runtime.suspended()) - halted
    present = set(await manager.runtime.list()) | halted | suspended
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(sandbox_id: str) -> Sandbox | None:
        async with gate:
            kept = PauseMode.FULL if sandbox_id in suspended else None
            kept = PauseMode.FILESYSTEM if sandbox_id in halted else kept
            return await _one(manager, sandbox_id, records.get(sandbox_id), sandbox_id in present, kept)

    found = await asyncio.gather(*(one(sandbox_id) for sandbox_id in present | records.keys()))
    return [sandbox for sandbox in found if sandbox is not None]


async def _one(
    manager: SandboxManager, sandbox_id: str, record: SandboxRecord | None, present: bool, kept: PauseMode | None
) -> Sandbox | None:
    """`kept`: what there is of one that has no processes."""
    doom = _doom(manager, record)
    if record is not None and present and doom is None:
        found = await _adopted(manager, record) if kept is None else await _halted(manager, record, kept)
        if found is not None:
            return found
    reason, detail = doom or (DeathReason.HOST, "it did not outlive a restart of the server")
    if present:
        await _destroy(manager, sandbox_id)
    if record is not None:
        await manager.graveyard.bury(DeathRecord(sandbox_id, record.tenant, reason, detail, time.time()))
    return None


async def _adopted(manager: SandboxManager, record: SandboxRecord) -> Sandbox | None:
    """One with processes; None if it does not live."""
    instance = await manager.runtime.adopt(record.id)
    if instance is None:
        return None
    sandbox = Sandbox.adopted(record, instance)
    try:
        if record.state == State.RUNNING:
            await _run(manager, sandbox)
        elif record.pause_mode == PauseMode.FILESYSTEM:
            await manager.runtime.halt(record.id)  # a resume was under way, and nobody was told of it
            return await _halted(manager, record, PauseMode.FILESYSTEM)
        elif manager.runtime.capabilities.memory_snapshot:
            try:
                await manager.runtime.suspend(record.id)  # as above
            except HostFull as error:
                await _resumed(manager, sandbox, error)
                return sandbox
            return await _halted(manager, record, PauseMode.FULL)
        else:
            await instance.pause()
            _set_paused(sandbox, record, PauseMode.FULL)
    except SandyardError as error:
        log.error("sandbox could not be taken over", sandbox=record.id, error=str(error))
        return None
    return sandbox


async def _run(manager: SandboxManager, sandbox: Sandbox) -> None:
    """Where it has no room to go on it waits for that."""
    try:
        if sandbox.instance.paused:
            await sandbox.instance.resume()
    except HostFull as error:
        log.error("a sandbox stands still until there is room", sandbox=sandbox.id, error=str(error))
        manager.later(_run_later(sandbox))


async def _run_later(sandbox: Sandbox) -> None:
    while sandbox.state.alive and sandbox.instance.paused:
        await asyncio.sleep(FULL_SECONDS)
        with contextlib.suppress(HostFull):
            await sandbox.instance.resume()


async def _resumed(manager: SandboxManager, sandbox: Sandbox, why: HostFull) -> None:
    """It cannot be paused again now, so its resume was one after all."""
    log.error("a sandbox was resumed, and nobody was told", sandbox=sandbox.id, error=str(why))
    sandbox.end_at = time.time() + max(sandbox.lifetime, FULL_SECONDS)
    try:
        await manager.store.set_running(sandbox.id, sandbox.end_at)
    except HostError as error:
        log.error("that a sandbox runs could not be recorded", sandbox=sandbox.id, error=str(error))


async def _halted(manager: SandboxManager, record: SandboxRecord, mode: PauseMode) -> Sandbox | None:
    """One with nothing but its disk, and its memory on it if it is suspended, whatever the record says."""
    try:
        if mode is PauseMode.FULL and record.pause_mode == PauseMode.FILESYSTEM:
            await manager.runtime.halt(record.id)  # its memory was to go
            mode = PauseMode.FILESYSTEM
        elif mode is PauseMode.FULL:
            await manager.runtime.suspend(record.id)  # what is left of a move that was not finished
    except SandyardError as error:  # all of it is on the disk: what a resume begins with is this once more
        log.error("something stays of a sandbox that is paused", sandbox=record.id, error=str(error))
        mode = PauseMode(record.pause_mode) if record.pause_mode else mode
    sandbox = Sandbox.adopted(record, HaltedInstance(manager.runtime, Sandbox.spec_of(record)))
    _set_paused(sandbox, record, mode)
    sandbox.placed = False
    if record.state != State.PAUSED or record.pause_mode != mode:
        try:
            await manager.store.set_paused(record.id, sandbox.paused_at or time.time(), mode.value)
        except HostError as error:  # the next server will find the same
            log.error("that a sandbox is paused could not be recorded", sandbox=record.id, error=str(error))
    return sandbox


def _set_paused(sandbox: Sandbox, record: SandboxRecord, mode: PauseMode) -> None:
    sandbox.state, sandbox.pause_mode = State.PAUSED, mode
    sandbox.paused_at = time.time() if record.paused_at is None else record.paused_at


def _doom(manager: SandboxManager, record: SandboxRecord | None) -> tuple[DeathReason, str] | None:
    """Why a recorded sandbox must not live on; None if it may."""
    if record is None:
        return DeathReason.HOST, "unknown"
    if record.lease_id is not None and record.lease_id not in manager.leases:
        return DeathReason.LEASE, "its lease is gone"
    if record.state == State.PAUSED:
        until = (record.paused_at or 0.0) + manager.settings.sandbox.max_paused
    else:
        # One that is to be paused at its end is paused as soon as its timer is set.
        until = float("inf") if record.on_timeout == OnTimeout.PAUSE else record.end_at
    return (DeathReason.TIMEOUT, "its time ended while the server was down") if until <= time.time() else None


async def _destroy(manager: SandboxManager, sandbox_id: str) -> None:
    try:
        await manager.runtime.destroy(sandbox_id)
    except SandyardError as error:
        log.error("leftover could not be destroyed", sandbox=sandbox_id, error=str(error))
        manager.reaper.straggle(sandbox_id)
