"""The end of sandboxes: noticed or asked for, carried out once, recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import DeathReason, HostError, SandboxDied, SandboxError, SandyardError
from sandyard.sandboxes.log import Level
from sandyard.sandboxes.model import Sandbox, State
from sandyard.sandboxes.stragglers import Stragglers
from sandyard.store import DeathRecord

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.reaping")

KILLS_AT_ONCE = 16
DESTROY_SECONDS = 20.0


class Reaper:
    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._stragglers = Stragglers(manager.runtime)
        self._at_once = asyncio.Semaphore(KILLS_AT_ONCE)
        self._kills: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._stragglers.start()

    async def stop(self) -> None:
        """Watch no more; the sandboxes are left alone."""
        for task in list(self._watches.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._stragglers.stop()

    def straggle(self, sandbox_id: str) -> None:
        """Keep trying to destroy what no place was taken for."""
        self._stragglers.add(sandbox_id, lambda: None)

    def watch(self, sandbox: Sandbox) -> None:
        """Notice its death from now on."""
        self.unwatch(sandbox)
        self._watches[sandbox.id] = asyncio.create_task(self._watch(sandbox))

    def unwatch(self, sandbox: Sandbox) -> None:
        watch = self._watches.pop(sandbox.id, None)
        if watch is not None:
            watch.cancel()

    async def kill(self, sandbox: Sandbox, reason: DeathReason, detail: str) -> None:
        """Destroy it, or wait for whoever already does. Raises `SandboxError`; the rest is retried then."""
        task = self._kills.get(sandbox.id)
        if task is None:
            if not sandbox.state.alive:
                return
            # Set before the first await: from here on the data plane answers that it is dead.
            sandbox.state = State.KILLING
            sandbox.death = SandboxDied(sandbox.id, reason, detail)
            task = self._kills[sandbox.id] = asyncio.create_task(self._kill(sandbox, sandbox.death))
            task.add_done_callback(lambda _: self._kills.pop(sandbox.id, None))
        await asyncio.shield(task)

    async def kill_quietly(self, sandbox: Sandbox, detail: str, reason: DeathReason = DeathReason.HOST) -> None:
        """`kill` for those who could do nothing about its failure."""
        # What could not be destroyed is logged by _kill and left to the stragglers.
        with contextlib.suppress(SandyardError):
            await self.kill(sandbox, reason, detail)

    async def kill_all(self, sandboxes: Sequence[Sandbox], reason: DeathReason, detail: str) -> None:
        await asyncio.gather(*(self.kill_quietly(sandbox, detail, reason) for sandbox in sandboxes))

    async def _watch(self, sandbox: Sandbox) -> None:
        death = await sandbox.instance.wait_dead()
        self._manager.later(self.kill(sandbox, death.reason, death.detail))

    async def _kill(self, sandbox: Sandbox, death: SandboxDied) -> None:
        manager = self._manager
        manager.expiry.disarm(sandbox)
        for listener in manager.on_death:
            listener(sandbox, death)
        try:
            async with self._at_once, asyncio.timeout(DESTROY_SECONDS):
                await manager.pausing.abandon(sandbox)
                await manager.runtime.destroy(sandbox.id)
        except (SandyardError, TimeoutError) as error:
            log.error("sandbox could not be destroyed", sandbox=sandbox.id, error=str(error) or "timed out")
            self._stragglers.add(sandbox.id, lambda: manager.unplace(sandbox))
            raise SandboxError(f"sandbox {sandbox.id} could not be destroyed: {error or 'timed out'}") from error
        else:
            manager.unplace(sandbox)
        finally:
            sandbox.state = State.DEAD
            manager.extension.stopped(sandbox)
            self.unwatch(sandbox)
            manager.forget(sandbox)
            self._log(sandbox, death)
            await self._bury(DeathRecord(sandbox.id, sandbox.tenant, death.reason, death.detail, time.time()))

    def _log(self, sandbox: Sandbox, death: SandboxDied) -> None:
        wanted = death.reason in (DeathReason.KILLED, DeathReason.TIMEOUT)
        sandbox.log.append(str(death), Level.INFO if wanted else Level.ERROR, reason=death.reason.value)
        self._manager.dead_logs.keep(sandbox.id, sandbox.tenant, sandbox.log)

    async def _bury(self, record: DeathRecord) -> None:
        try:
            await self._manager.graveyard.bury(record)
        except HostError as error:
            # It is dead all the same, as was asked for; the next start finds that it does not live, and records it.
            log.error("a death could not be recorded", sandbox=record.id, error=str(error))
