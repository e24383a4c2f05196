"""Pause and resume: the moves of a sandbox between running and paused, one at a time for each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from sandyard.errors import Conflict, DeathReason, HostError, HostFull, NotFound, SandyardError, Unsupported
from sandyard.runtimes.base import Instance
from sandyard.sandboxes.halted import HaltedInstance
from sandyard.sandboxes.model import OnTimeout, PauseMode, Sandbox, State
from sandyard.sandboxes.starting import tell_environment

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.pausing")

AUTO_RESUME_WAIT = 60.0
AUTO_RESUME_LIFE = 300.0
FULL_SECONDS = 30.0
"""For how long the end of one does not come that could not be paused, or its pause recorded, for want of room on the
host's disk."""


class Pausing:
    """Every move runs to its end, whoever stops waiting for it. A move that fails leaves the sandbox as it
    was; where not even that can be had, it is killed."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._moves: dict[str, asyncio.Task[None]] = {}

    def check(self, *, memory: bool) -> None:
        """Raises `Unsupported` where the runtime cannot pause this way."""
        runtime = self._manager.runtime
        if memory and not runtime.capabilities.pause_keeps_memory:
            raise Unsupported(
                f"runtime {runtime.name} cannot keep the memory of a paused sandbox here",
                remedy="pause with memory: false" if runtime.capabilities.halt else None,
            )
        if not memory and not runtime.capabilities.halt:
            raise Unsupported(f"runtime {runtime.name} cannot pause a sandbox without its memory")

    async def settle(self, sandbox: Sandbox) -> None:
        """Wait for the move under way, however it ends."""
        while (move := self._moves.get(sandbox.id)) is not None:
            await asyncio.wait({move})

    async def finish(self) -> None:
        """Wait for every move under way, however it ends."""
        while moves := set(self._moves.values()):
            await asyncio.wait(moves)

    async def abandon(self, sandbox: Sandbox) -> None:
        """End the move under way, of a sandbox that is being killed; returns when nothing of it runs."""
        if (move := self._moves.get(sandbox.id)) is not None:
            move.cancel()
        await self.settle(sandbox)

    async def pause(self, sandbox: Sandbox, *, memory: bool = True, why: str = "as asked for") -> None:
        """Pause, with the processes and their memory or with the files only. It is recorded before this returns.

        Raises `Unsupported` before anything happens, `Conflict` (it is paused), `SandboxDied`, and what the
        runtime raises, with the sandbox running."""
        self.check(memory=memory)
        await self.settle(sandbox)
        _check_alive(sandbox)
        if sandbox.state is State.PAUSED:
            raise Conflict(f"sandbox '{sandbox.id}' is already paused")
        sandbox.state = State.PAUSING
        await self._move(sandbox, self._pause(sandbox, memory, why))

    async def resume(self, sandbox: Sandbox, seconds: float, *, memory: bool = True) -> bool:
        """Let a paused sandbox go on, to live at least `seconds`; without `memory` it boots in any case. Two at
        once do the work once. False if it ran already: nothing happens then.

        Raises `SandboxDied`, `CapacityError` (one that boots needs a place), and what the runtime raises, with
        the sandbox paused."""
        self._manager.check_timeout(seconds)
        if sandbox.state is State.RESUMING and (move := self._moves.get(sandbox.id)) is not None:
            await _joined(sandbox, move)
            await self._manager.set_timeout(sandbox, seconds, only_extend=True)
            return True
        await self.settle(sandbox)
        _check_alive(sandbox)
        if sandbox.state is not State.PAUSED:
            return False
        sandbox.state = State.RESUMING
        await self._move(sandbox, self._resume(sandbox, seconds, memory))
        return True

    async def reach(self, sandbox: Sandbox) -> None:
        """Have the sandbox running for a request to it; it is resumed where its policy lets traffic do so.

        Raises `NotFound` where it does not, `SandboxDied`, `TimeoutError`, and what `resume` raises."""
        seconds = min(max(AUTO_RESUME_LIFE, sandbox.lifetime), self._manager.settings.sandbox.max_timeout)
        async with asyncio.timeout(AUTO_RESUME_WAIT):
            while sandbox.state is not State.RUNNING:  # somebody may pause it again at once
                if sandbox.state is State.PAUSING and sandbox.policy.auto_resume:
                    await self.settle(sandbox)  # what it keeps is known then
                resumes = sandbox.policy.auto_resume and sandbox.pause_mode is not PauseMode.FILESYSTEM
                if sandbox.state not in (State.RUNNING, State.RESUMING) and not resumes:
                    _check_alive(sandbox)
                    raise NotFound(f"sandbox '{sandbox.id}' is paused")
                with contextlib.suppress(Conflict):  # it runs no more
                    await self.resume(sandbox, seconds)

    async def expire(self, sandbox: Sandbox, detail: str) -> None:
        """The sandbox's time is over: pause or kill it, as it was made."""
        if sandbox.state in (State.PAUSING, State.RESUMING):
            return  # the end of the move sets its timers anew
        if sandbox.state is State.RUNNING and sandbox.policy.on_timeout is OnTimeout.PAUSE:
            try:
                await self.pause(sandbox, memory=sandbox.policy.memory, why=detail)
                return
            except Conflict:
                return  # somebody else did
            except (HostFull, HostError) as error:
                log.error("sandbox waits for its end: it cannot be paused now", sandbox=sandbox.id, error=str(error))
                return
            except SandyardError as error:
                if sandbox.paused_at is not None:
                    return  # it is, though not as it should be
                log.error("sandbox could not be paused at its end", sandbox=sandbox.id, error=str(error))
                detail = f"{detail}, and it could not be paused: {error}"
        await self._manager.kill(sandbox.id, DeathReason.TIMEOUT, detail)

    async def forget_memory(self, sandbox: Sandbox) -> None:
        """Let a paused sandbox keep its files only. Raises what the runtime raises."""
        await self._halt(sandbox)
        sandbox.pause_mode = PauseMode.FILESYSTEM
        at = time.time() if sandbox.paused_at is None else sandbox.paused_at
        await self._manager.store.set_paused(sandbox.id, at, PauseMode.FILESYSTEM.value)

    # --- the moves ---

    async def _move(self, sandbox: Sandbox, work: Coroutine[Any, Any, None]) -> None:
        task = self._moves[sandbox.id] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._moved(sandbox.id, done))
        await _joined(sandbox, task)

    def _moved(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        self._moves.pop(sandbox_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a move failed", sandbox=sandbox_id, error=str(error))

    async def _pause(self, sandbox: Sandbox, memory: bool, why: str) -> None:
        manager = self._manager
        mode = PauseMode.FULL if memory else PauseMode.FILESYSTEM
        manager.expiry.disarm(sandbox)
        began = time.monotonic()
        try:
            if not memory:
                await self._halt(sandbox)
            elif self._suspends:
                await self._suspend(sandbox)
            else:
                await sandbox.instance.pause()
            sandbox.paused_at = time.time()
            await manager.store.set_paused(sandbox.id, sandbox.paused_at, mode.value)
        except BaseException as error:
            await self._run_again(sandbox, rest=FULL_SECONDS if isinstance(error, (HostFull, HostError)) else 0.0)
            raise
        if sandbox.state is State.PAUSING:  # else it is being killed
            self._paused(sandbox, mode, why, began)

    def _paused(self, sandbox: Sandbox, mode: PauseMode, why: str, began: float) -> None:
        manager = self._manager
        sandbox.state, sandbox.pause_mode = State.PAUSED, mode
        manager.expiry.arm(sandbox)
        manager.extension.stopped(sandbox)
        kept = "with its memory" if mode is PauseMode.FULL else "with its files only"
        sandbox.log.append(f"paused {kept}: {why}", seconds=f"{time.monotonic() - began:.3f}")
        for listener in manager.on_pause:
            listener(sandbox)

    async def _resume(self, sandbox: Sandbox, seconds: float, memory: bool) -> None:
        manager = self._manager
        began = time.monotonic()
        try:
            if sandbox.pause_mode is PauseMode.FULL and memory:
                await (self._wake(sandbox) if self._suspends else sandbox.instance.resume())
            else:
                await self._halt(sandbox)
                sandbox.pause_mode = PauseMode.FILESYSTEM
                await self._boot(sandbox)
            await manager.extension.started(sandbox, fresh=False)
            end_at = time.time() + seconds
            await manager.store.set_running(sandbox.id, end_at)
            if sandbox.extension:
                await manager.store.set_extension(sandbox.id, sandbox.extension)
        except BaseException:
            manager.extension.stopped(sandbox)
            await self._pause_again(sandbox)
            raise
        if sandbox.state is not State.RESUMING:
            return  # it is being killed
        booted = sandbox.pause_mode is PauseMode.FILESYSTEM
        sandbox.end_at, sandbox.lifetime = end_at, seconds
        sandbox.state, sandbox.paused_at, sandbox.pause_mode = State.RUNNING, None, None
        sandbox.touch()
        manager.expiry.arm(sandbox)
        sandbox.log.append("booted" if booted else "resumed", seconds=f"{time.monotonic() - began:.3f}")

    @property
    def _suspends(self) -> bool:
        """Whether one that is paused with its memory has it on the host's disk, and takes no place."""
        return self._manager.runtime.capabilities.memory_snapshot

    async def _halt(self, sandbox: Sandbox) -> None:
        """End the processes and give the place back. Idempotent."""
        self._manager.reaper.unwatch(sandbox)
        await self._manager.runtime.halt(sandbox.id)
        self._stand_in(sandbox)

    async def _suspend(self, sandbox: Sandbox) -> None:
        """Bring the processes to the disk and give the place back. Idempotent."""
        self._manager.reaper.unwatch(sandbox)
        await self._manager.runtime.suspend(sandbox.id)
        self._stand_in(sandbox)

    def _stand_in(self, sandbox: Sandbox) -> None:
        sandbox.instance = HaltedInstance(self._manager.runtime, sandbox.instance.spec)
        self._manager.unplace(sandbox)

    async def _wake(self, sandbox: Sandbox) -> None:
        await self._place(sandbox)
        self._take(sandbox, await self._manager.runtime.wake(sandbox.instance.spec))
        await self._manager.permit(sandbox)

    async def _place(self, sandbox: Sandbox) -> None:
        if not sandbox.placed:
            await self._manager.maker.make_room(sandbox.resources)
            sandbox.placed = True

    async def _boot(self, sandbox: Sandbox) -> None:
        manager = self._manager
        await self._place(sandbox)
        self._take(sandbox, await manager.runtime.boot(sandbox.instance.spec))
        await manager.permit(sandbox)
        if sandbox.start:
            await tell_environment(sandbox.instance, sandbox.envs)
        await manager.starter.run(sandbox.instance, sandbox.start, sandbox.log)

    def _take(self, sandbox: Sandbox, instance: Instance) -> None:
        sandbox.instance = instance
        self._manager.reaper.watch(sandbox)

    async def _run_again(self, sandbox: Sandbox, rest: float) -> None:
        """After a pause that failed: running, as before; its time is not over for another `rest` seconds."""
        if not sandbox.state.alive:
            return
        try:
            if sandbox.id in await self._manager.runtime.halted():
                await self._halt(sandbox)
                await self._boot(sandbox)
            elif sandbox.id in await self._manager.runtime.suspended():
                await self._suspend(sandbox)
                await self._wake(sandbox)
            else:
                await sandbox.instance.resume()
                self._manager.reaper.watch(sandbox)
        except SandyardError as error:
            detail = f"a pause failed, and it does not run any more: {error}"
            if (mode := await self._kept(sandbox)) is None:
                self._give_up(sandbox, detail)
            elif sandbox.state is State.PAUSING:
                # Nothing of it is lost, and also the next server will find it so.
                log.error("a sandbox stays paused", sandbox=sandbox.id, error=detail)
                self._stand_in(sandbox)
                sandbox.paused_at = time.time()
                self._paused(sandbox, mode, detail, time.monotonic())
            return
        self._runs(sandbox, State.PAUSING, rest=rest)

    def _runs(self, sandbox: Sandbox, state: State, *, rest: float = 0.0) -> None:
        if sandbox.state is state:
            sandbox.state, sandbox.paused_at, sandbox.pause_mode = State.RUNNING, None, None
            self._manager.expiry.arm(sandbox, rest=rest)

    async def _kept(self, sandbox: Sandbox) -> PauseMode | None:
        """What there is on the disk of one that does not run."""
        runtime = self._manager.runtime
        with contextlib.suppress(SandyardError):
            if sandbox.id in await runtime.halted():
                return PauseMode.FILESYSTEM
            if sandbox.id in await runtime.suspended():
                return PauseMode.FULL
        return None

    async def _pause_again(self, sandbox: Sandbox) -> None:
        """After a resume that failed: paused, as before."""
        if not sandbox.state.alive:
            return
        try:
            if sandbox.pause_mode is PauseMode.FILESYSTEM:
                await self.forget_memory(sandbox)
            elif self._suspends:
                await self._suspend(sandbox)
            else:
                await sandbox.instance.pause()
        except SandyardError as error:
            mode, detail = await self._kept(sandbox), f"a resume failed, and it cannot be paused again: {error}"
            if mode is None and (not self._suspends or isinstance(sandbox.instance, HaltedInstance)):
                self._give_up(sandbox, detail)
                return
            log.error("a sandbox is not what it is recorded as", sandbox=sandbox.id, error=detail)
            if mode is None:  # it runs, and goes on with that: what it has would be lost
                self._manager.reaper.watch(sandbox)
                sandbox.end_at = time.time() + max(sandbox.lifetime, FULL_SECONDS)
                self._runs(sandbox, State.RESUMING)
                return
            self._stand_in(sandbox)
            sandbox.pause_mode = mode
        if sandbox.state is State.RESUMING:
            sandbox.state = State.PAUSED
            self._manager.expiry.arm(sandbox)

    def _give_up(self, sandbox: Sandbox, detail: str) -> None:
        # Not awaited: the kill waits for the end of this very move.
        self._manager.later(self._manager.reaper.kill_quietly(sandbox, detail))


async def _joined(sandbox: Sandbox, move: asyncio.Task[None]) -> None:
    """Wait for a move and share its failure; whoever stops waiting stops nothing."""
    try:
        await asyncio.shield(move)
    except asyncio.CancelledError:
        if move.cancelled():  # not the caller was called off, but the move, for a kill
            _check_alive(sandbox)
        raise


def _check_alive(sandbox: Sandbox) -> None:
    if not sandbox.state.alive:
        raise sandbox.death or NotFound(f"sandbox '{sandbox.id}' not found")
