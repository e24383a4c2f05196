"""Where neither the one nor the other can be had, as on a disk that is full, a sandbox stays what it is: it is not
killed for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import CreateFailed, HostError, HostFull, SandboxError
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime
from sandyard.sandboxes import State, pausing, recovery
from sandyard.sandboxes.model import OnTimeout, PauseMode, TimeoutPolicy
from tests.sandboxes.test_keeping_memory import started

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


class Stubborn(MemoryRuntime):
    """While `full` nothing can be suspended, and one that is cannot be cleared away: `stuck`."""

    def __init__(self) -> None:
        super().__init__(keeps_memory=True)
        self.full = False
        self.stuck = False

    async def suspend(self, sandbox_id: str) -> None:
        if self.full and sandbox_id not in self._suspended:
            raise HostFull(f"sandbox {sandbox_id}: no room", remedy="free space")
        if self.stuck and sandbox_id in self._suspended:
            raise SandboxError(f"sandbox {sandbox_id}: its VMM does not go")
        await super().suspend(sandbox_id)


async def fail(*_: object) -> None:
    raise HostError("database: disk full")


async def test_a_pause_that_is_not_recorded_nor_undone(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Stubborn()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
        pid = await started(made)

        async def pause_in_vain() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(yard.store, "set_paused", fail)
                runtime.fail_next.append(CreateFailed("disk", "no room"))
                with pytest.raises(HostError):
                    await yard.pausing.pause(made)

        await pause_in_vain()
        assert (made.state, made.pause_mode, made.placed) == (State.PAUSED, PauseMode.FULL, False)
        assert await yard.pausing.resume(made, 60)
        assert pid in await made.agent.processes()
        await pause_in_vain()
    async with open_yard(runtime) as yard:  # which was told that it runs
        found = yard.look(made.id)
        assert await yard.pausing.resume(found, 60)
        assert pid in await found.agent.processes()


async def test_the_end_of_one_waits_until_its_pause_can_be_recorded(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing, "FULL_SECONDS", 0.1)
    runtime, tried = Stubborn(), 0
    async with open_yard(runtime) as yard:
        recorded = yard.store.set_paused

        async def full(sandbox_id: str, at: float, mode: str) -> None:
            nonlocal tried
            tried += 1
            if tried == 2:
                runtime.fail_next.append(CreateFailed("disk", "no room"))
            if tried < 3:
                await fail()
            await recorded(sandbox_id, at, mode)

        monkeypatch.setattr(yard.store, "set_paused", full)
        made = await yard.create(wanted(policy=TimeoutPolicy(OnTimeout.PAUSE), timeout=0.05))
        pid = await started(made)
        await until(lambda: tried == 1 and made.state is State.RUNNING)
        await until(lambda: made.state is State.PAUSED)
        assert tried == 2
        await asyncio.sleep(0.2)
        assert await yard.pausing.resume(made, 60)
        assert pid in await made.agent.processes()


async def test_a_resume_that_is_not_recorded_nor_undone(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Stubborn()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
        pid = await started(made)
        await yard.pausing.pause(made)
        with monkeypatch.context() as patch:
            patch.setattr(yard.store, "set_running", fail)
            runtime.full = True
            with pytest.raises(HostError):
                await yard.pausing.resume(made, 60)
        assert (made.state, made.pause_mode, made.placed) == (State.RUNNING, None, True)
        assert pid in await made.agent.processes()
    async with open_yard(runtime) as yard:  # which was told that it is paused, and has no room for that
        found = yard.look(made.id)
        assert (found.state, found.placed, yard.admission.count) == (State.RUNNING, True, 1)
        assert pid in await found.agent.processes()
        runtime.full = False
        await yard.pausing.pause(found)
        assert found.pause_mode is PauseMode.FULL


async def test_a_resume_that_fails_leaves_what_is_on_the_disk(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Stubborn()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
        pid = await started(made)
        await yard.pausing.pause(made)
        runtime.stuck = True
        runtime.fail_next.append(CreateFailed("vmm", "no luck"))
        with pytest.raises(CreateFailed):
            await yard.pausing.resume(made, 60)
        assert (made.state, made.pause_mode) == (State.PAUSED, PauseMode.FULL)
    async with open_yard(runtime) as yard:  # and so does a server that cannot clear it away either
        found = yard.look(made.id)
        assert (found.state, found.pause_mode) == (State.PAUSED, PauseMode.FULL)
        runtime.stuck = False
        assert await yard.pausing.resume(found, 60)
        assert pid in await found.agent.processes()


async def test_one_that_was_stopped_in_a_snapshot_waits_for_room(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    async def no_room(instance: MemoryInstance) -> None:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise HostFull("it stands still", remedy="free space")
        instance.paused = False

    monkeypatch.setattr(recovery, "FULL_SECONDS", 0.01)
    monkeypatch.setattr(MemoryInstance, "resume", no_room)
    runtime = Stubborn()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
        pid = await started(made)
    runtime.instances[made.id].paused = True  # where its server was killed
    async with open_yard(runtime) as yard:
        found = yard.look(made.id)
        await until(lambda: not found.instance.paused)
        assert pid in await found.agent.processes()
        assert tried == 3
