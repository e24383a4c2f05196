"""The lifecycle over a runtime that brings memory to the disk: what is paused takes no place, copies go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import CapacityError, CreateFailed, HostError
from sandyard.guest.base import ProcessSpec
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime
from sandyard.sandboxes import Sandbox, State
from sandyard.sandboxes.model import PauseMode
from sandyard.sandboxes.starting import StartCommand

if TYPE_CHECKING:
    from sandyard.runtimes.base import Instance
    from tests.sandboxes.conftest import OpenYard, Wanted


class Runtime(MemoryRuntime):
    """Remembers what it was asked to make."""

    def __init__(self) -> None:
        super().__init__(keeps_memory=True)
        self.asked: list[SandboxSpec] = []

    async def create(self, spec: SandboxSpec) -> Instance:
        self.asked.append(spec)
        return await super().create(spec)


async def started(sandbox: Sandbox) -> int:
    """The pid of a process that runs on."""
    return (await sandbox.agent.spawn(ProcessSpec(["sleep", "60"]))).pid


async def test_what_is_paused_takes_no_place_and_goes_on(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(Runtime(), max_count=1) as yard:
        first = await yard.create(wanted())
        pid = await started(first)
        await yard.pausing.pause(first)
        assert (first.pause_mode, first.placed, yard.admission.count) == (PauseMode.FULL, False, 0)
        second = await yard.create(wanted())
        with pytest.raises(CapacityError):
            await yard.pausing.resume(first, 60)
        assert (first.state, first.pause_mode) == (State.PAUSED, PauseMode.FULL)
        await yard.pausing.pause(second)
        assert await yard.pausing.resume(first, 60)
        assert pid in await first.agent.processes()
        assert yard.admission.count == 1


async def test_it_outlives_servers(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    for keep in (True, False):  # one that was killed, as good as, and one that was stopped
        async with open_yard(runtime, keep=keep) as yard:
            made = await yard.create(wanted())
            pid = await started(made)
            await yard.pausing.pause(made)
        async with open_yard(runtime) as yard:
            found = yard.look(made.id)
            assert (found.state, found.pause_mode, found.placed) == (State.PAUSED, PauseMode.FULL, False)
            assert await yard.pausing.resume(found, 60)
            assert pid in await found.agent.processes()


async def test_a_server_that_ended_in_a_move_is_made_up_for(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime, keep=True) as yard:
        made, other = await yard.create(wanted()), await yard.create(wanted())
        await yard.pausing.pause(other, memory=False)
    await runtime.suspend(made.id)  # and nothing was recorded
    async with open_yard(runtime, keep=True) as yard:
        assert yard.look(made.id).pause_mode is PauseMode.FULL
        assert yard.look(other.id).pause_mode is PauseMode.FILESYSTEM
        spec = yard.look(made.id).instance.spec
    await runtime.wake(spec)  # and nobody was told
    async with open_yard(runtime) as yard:
        found = yard.look(made.id)
        assert (found.state, found.pause_mode) == (State.PAUSED, PauseMode.FULL)
        assert await yard.pausing.resume(found, 60)


async def test_what_cannot_be_recorded_is_undone(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise HostError("database: disk full")

    runtime = Runtime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        pid = await started(made)
        with monkeypatch.context() as patch:
            patch.setattr(yard.store, "set_paused", fail)
            with pytest.raises(HostError):
                await yard.pausing.pause(made)
        assert (made.state, yard.admission.count) == (State.RUNNING, 1)
        assert pid in await made.agent.processes()
        await yard.pausing.pause(made)
        with monkeypatch.context() as patch:
            patch.setattr(yard.store, "set_running", fail)
            with pytest.raises(HostError):
                await yard.pausing.resume(made, 60)
        assert (made.state, yard.admission.count, await runtime.suspended()) == (State.PAUSED, 0, [made.id])
        runtime.fail_next.append(CreateFailed("restore", "no luck"))
        with pytest.raises(CreateFailed):
            await yard.pausing.resume(made, 60)
        assert (made.state, yard.admission.count) == (State.PAUSED, 0)
        assert await yard.pausing.resume(made, 60)
        assert pid in await made.agent.processes()


async def test_it_boots_where_its_memory_is_not_wanted(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await started(made)
        await made.agent.write_file("/kept", b"kept")
        await yard.pausing.pause(made)
        assert await yard.pausing.resume(made, 60, memory=False)
        assert await made.agent.processes() == []
        assert b"".join([chunk async for chunk in made.agent.read_file("/kept")]) == b"kept"
        assert (await runtime.suspended(), await runtime.halted()) == ([], [])


async def test_copies_go_on_with_the_memory(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = Runtime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        source.start = StartCommand("sleep 60", None)
        for paused in (False, True):
            if paused:
                await yard.pausing.pause(source)
            snapshot = await yard.copying.snapshot(source)
            assert snapshot.memory
            copy = await yard.create(wanted(snapshot.id))
            (child,) = await yard.copying.fork(source, 1, 60)
            assert isinstance(child, Sandbox)
            for each, asked in zip((copy, child), runtime.asked[-2:], strict=True):
                assert asked.memory == asked.rootfs.layers[0]
                # It stands on what its source stood on: the topmost layer is its own now.
                assert list(each.instance.spec.rootfs.layers) == []
                assert await each.agent.processes() == []  # the start command is not run: it runs
            await asyncio.gather(yard.copying.snapshot(copy), yard.pausing.pause(child))
        await yard.pausing.forget_memory(source)
        assert not yard.copying.keeps_memory(source)
        files = await yard.copying.snapshot(source)
        assert not files.memory
        last = await yard.create(wanted(files.id))
        assert runtime.asked[-1].memory is None
        assert isinstance(last.instance, MemoryInstance)
        assert len(await last.agent.processes()) == 1  # started anew
