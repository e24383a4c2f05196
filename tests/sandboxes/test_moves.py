"""Pause and resume as the lifecycle has them: one move at a time, failures, deaths, restarts."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from sandyard.errors import (
    AgentLinkError,
    Conflict,
    CreateFailed,
    DeathReason,
    HostError,
    HostFull,
    NotFound,
    SandboxDied,
    SandboxError,
)
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime
from sandyard.sandboxes import Sandbox, State, pausing
from sandyard.sandboxes.model import OnTimeout, PauseMode, TimeoutPolicy
from sandyard.sandboxes.starting import StartCommand

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted

PAUSES = TimeoutPolicy(OnTimeout.PAUSE)


async def read(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([chunk async for chunk in sandbox.agent.read_file(path)])


class SlowRuntime(MemoryRuntime):
    """Counts boots and takes its time with them and with halts."""

    def __init__(self) -> None:
        super().__init__()
        self.boots = 0

    async def boot(self, spec: Any) -> Any:
        self.boots += 1
        await asyncio.sleep(0.02)
        return await super().boot(spec)

    async def halt(self, sandbox_id: str) -> None:
        await asyncio.sleep(0.02)
        await super().halt(sandbox_id)


async def test_two_resumes_at_once_do_the_work_once(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = SlowRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await yard.pausing.pause(made, memory=False)
        answers = await asyncio.gather(*(yard.pausing.resume(made, seconds) for seconds in (10, 500, 20)))
        assert answers == [True, True, True]
        assert runtime.boots == 1
        assert made.end_at > time.time() + 490
        assert await yard.pausing.resume(made, 10) is False


async def test_two_pauses_at_once_are_one_and_a_conflict(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(SlowRuntime()) as yard:
        made = await yard.create(wanted())
        both = (yard.pausing.pause(made, memory=False), yard.pausing.pause(made, memory=False))
        first, second = await asyncio.gather(*both, return_exceptions=True)
        assert first is None
        assert isinstance(second, Conflict)
        assert made.pause_mode is PauseMode.FILESYSTEM


async def test_whoever_stops_waiting_stops_nothing(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    async with open_yard(SlowRuntime()) as yard:
        made = await yard.create(wanted())
        pausing = asyncio.ensure_future(yard.pausing.pause(made, memory=False))
        await asyncio.sleep(0.005)
        assert made.state is State.PAUSING
        pausing.cancel()
        await until(lambda: made.state is State.PAUSED)


async def test_a_kill_during_a_move_is_the_last_word(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = SlowRuntime()
    async with open_yard(runtime) as yard:
        for start_with_pause in (False, True):
            made = await yard.create(wanted())
            if start_with_pause:
                await yard.pausing.pause(made, memory=False)
                move: asyncio.Future[Any] = asyncio.ensure_future(yard.pausing.resume(made, 60))
            else:
                move = asyncio.ensure_future(yard.pausing.pause(made, memory=False))
            await asyncio.sleep(0.005)
            await yard.kill(made.id, DeathReason.KILLED)
            await asyncio.wait([move])
            assert made.state is State.DEAD
            assert await runtime.list() == []
            assert yard.admission.count == 0
            with pytest.raises(SandboxDied):
                await yard.pausing.resume(made, 60)


async def test_a_kill_does_not_wait_for_a_boot_to_become_ready(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await yard.pausing.pause(made, memory=False)
        made.start = StartCommand(None, "false")  # never ready
        waiting = [asyncio.ensure_future(yard.pausing.resume(made, 60)) for _ in range(2)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await yard.kill(made.id, DeathReason.KILLED)
        assert time.monotonic() - began < 2
        for each in waiting:
            with pytest.raises(SandboxDied):
                await each
        assert await runtime.list() == []
        assert yard.admission.count == 0


async def test_traffic_does_not_wake_what_is_about_to_keep_files_only(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(SlowRuntime()) as yard:
        made = await yard.create(wanted(policy=TimeoutPolicy(OnTimeout.PAUSE, True, True)))
        pausing = asyncio.ensure_future(yard.pausing.pause(made, memory=False))
        await asyncio.sleep(0.005)
        with pytest.raises(NotFound, match="paused"):
            await yard.reach(made.id)
        await pausing
        assert made.state is State.PAUSED


async def test_a_pause_that_cannot_be_recorded_leaves_it_running(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        made = await yard.create(wanted())
        await made.agent.write_file("/kept", b"kept")

        async def fail(*_: object) -> None:
            raise HostError("database: disk full")

        for memory in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(yard.store, "set_paused", fail)
                with pytest.raises(HostError):
                    await yard.pausing.pause(made, memory=memory)
            assert (made.state, made.paused_at, yard.admission.count) == (State.RUNNING, None, 1)
            assert await read(made, "/kept") == b"kept"
        await yard.pausing.pause(made)
        with monkeypatch.context() as patch:
            patch.setattr(yard.store, "set_running", fail)
            with pytest.raises(HostError):
                await yard.pausing.resume(made, 60)
        assert made.state is State.PAUSED
        assert await yard.pausing.resume(made, 60)


async def test_a_halt_that_fails_leaves_it_running(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        with monkeypatch.context() as patch:

            async def fail(_sandbox_id: str) -> None:
                raise SandboxError("processes do not die")

            patch.setattr(runtime, "halt", fail)
            with pytest.raises(SandboxError):
                await yard.pausing.pause(made, memory=False)
        assert made.state is State.RUNNING
        await runtime.instances[made.id].die(DeathReason.OOM)  # it is watched as before
        await until(lambda: made.state is State.DEAD)


async def test_a_death_while_paused_is_noticed(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await yard.pausing.pause(made)
        await runtime.instances[made.id].die(DeathReason.OOM)
        await until(lambda: made.state is State.DEAD)
        with pytest.raises(SandboxDied, match="oom"):
            yard.get("t", made.id)


async def test_places_while_paused(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime(), max_count=2) as yard:
        frozen, halted = await yard.create(wanted()), await yard.create(wanted())
        await yard.pausing.pause(frozen)
        assert yard.admission.count == 2
        await yard.pausing.pause(halted, memory=False)
        assert yard.admission.count == 1
        assert yard.capacity()["running"] == 1
        await yard.pausing.resume(halted, 60)
        assert yard.admission.count == 2
        for sandbox in (frozen, halted):
            await yard.kill(sandbox.id, DeathReason.KILLED)
        assert yard.admission.count == 0


async def test_the_longest_pause_ends(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        monkeypatch.setattr(yard.expiry, "_max_paused", 0.1)
        made = await yard.create(wanted(timeout=0.05, policy=PAUSES))
        await until(lambda: made.state is State.PAUSED)
        await until(lambda: made.state is State.DEAD)
        with pytest.raises(SandboxDied, match="max_paused"):
            yard.get("t", made.id)


async def test_one_that_cannot_be_paused_at_its_end_dies(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        made = await yard.create(wanted(timeout=0.05, policy=PAUSES))

        async def fail(_self: MemoryInstance) -> None:
            raise SandboxError("does not freeze")

        monkeypatch.setattr(MemoryInstance, "pause", fail)
        await until(lambda: made.state is State.DEAD)
        with pytest.raises(SandboxDied, match="does not freeze"):
            yard.get("t", made.id)


async def test_leases_and_sweeps_reach_the_paused(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        lease = await yard.leases.create("t", 60, {})
        leased = await yard.create(wanted(lease_id=lease.id))
        labelled = await yard.create(wanted(metadata={"batch": "1"}))
        await yard.pausing.pause(leased, memory=False)
        await yard.pausing.pause(labelled)
        await yard.drop_lease(lease)
        assert await yard.sweep("t", {"batch": "1"}) == [labelled.id]
        assert await runtime.list() == []


async def test_traffic_waits_for_whoever_resumes(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = SlowRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted(policy=TimeoutPolicy(OnTimeout.KILL, True, False)))
        await yard.pausing.pause(made, memory=False)
        with pytest.raises(NotFound, match="paused"):
            await yard.reach(made.id)
        resuming = asyncio.ensure_future(yard.pausing.resume(made, 60))
        await asyncio.sleep(0.005)
        assert await yard.reach(made.id) is made
        assert await resuming


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("memory", [True, False])
async def test_paused_ones_outlive_a_restart(open_yard: OpenYard, wanted: Wanted, keep: bool, memory: bool) -> None:
    """A stop that keeps nothing running keeps the files of what is paused."""
    runtime = MemoryRuntime()
    policy = TimeoutPolicy(OnTimeout.PAUSE, True, True)
    async with open_yard(runtime, keep=keep) as yard:
        made = await yard.create(wanted(metadata={"a": "b"}, policy=policy, network={"allowOut": ["1.1.1.1"]}))
        await made.agent.write_file("/kept", b"kept")
        await yard.pausing.pause(made, memory=memory)
    async with open_yard(runtime) as yard:
        found = yard.get("t", made.id)
        kept = memory and keep
        assert (found.state, found.pause_mode) == (
            State.PAUSED,
            PauseMode.FULL if kept else PauseMode.FILESYSTEM,
        )
        assert (found.policy, found.network, found.build_id) == (policy, made.network, made.build_id)
        assert found.paused_at == made.paused_at
        assert yard.admission.count == (1 if kept else 0)
        assert await yard.pausing.resume(found, 60)
        assert await read(found, "/kept") == b"kept"
        assert yard.admission.count == 1


async def test_moves_that_a_dead_server_left_half_are_finished(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        frozen, halted, thawed, booted = [await yard.create(wanted()) for _ in range(4)]
        await yard.pausing.pause(thawed)
        await yard.pausing.pause(booted, memory=False)
    # What the next server finds: moves begun in the runtime, and not recorded.
    await runtime.instances[frozen.id].pause()
    await runtime.halt(halted.id)
    await runtime.instances[thawed.id].resume()
    await runtime.boot(booted.instance.spec)
    async with open_yard(runtime, keep=True) as yard:
        states = {each.id: (each.state, each.pause_mode) for each in yard.everyone()}
        assert states == {
            frozen.id: (State.RUNNING, None),
            halted.id: (State.PAUSED, PauseMode.FILESYSTEM),
            thawed.id: (State.PAUSED, PauseMode.FULL),
            booted.id: (State.PAUSED, PauseMode.FILESYSTEM),
        }
        assert yard.admission.count == 2
        await yard.get("t", frozen.id).agent.hello()
    async with open_yard(runtime) as yard:
        for each in (halted, thawed, booted):
            assert await yard.pausing.resume(yard.get("t", each.id), 60)


async def test_its_end_came_while_the_server_was_down(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted(timeout=0.2, policy=PAUSES))
    await asyncio.sleep(0.25)
    async with open_yard(runtime) as yard:
        found = yard.get("t", made.id)
        await until(lambda: found.state is State.PAUSED)


async def test_a_boot_that_fails_gives_its_place_back(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await yard.pausing.pause(made, memory=False)
        runtime.fail_next.append(CreateFailed("engine", "no luck"))
        with pytest.raises(CreateFailed):
            await yard.pausing.resume(made, 60)
        assert (made.state, yard.admission.count) == (State.PAUSED, 0)


async def test_traffic_gets_through_to_one_that_is_paused_again_meanwhile(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(SlowRuntime()) as yard:
        made = await yard.create(wanted(policy=TimeoutPolicy(auto_resume=True)))
        await yard.pausing.pause(made)
        first = asyncio.ensure_future(yard.reach(made.id))
        await asyncio.sleep(0)
        assert made.state is State.RESUMING
        pausing = asyncio.ensure_future(yard.pausing.pause(made))  # it is next when the resume has ended
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(yard.reach(made.id)) for _ in range(3)]
        assert await asyncio.gather(first, *others) == [made] * 4
        await pausing
        assert yard.find(made.id) is made


class LateRuntime(MemoryRuntime):
    """Looks for a sandbox until it is told what it found: nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def adopt(self, sandbox_id: str) -> Any:
        self.asked.set()
        await self.go.wait()
        return None


async def test_a_pause_while_a_link_is_looked_for_is_no_crash(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_agent: MemoryAgent) -> dict[str, str]:
        raise AgentLinkError("no answer")

    runtime = LateRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        monkeypatch.setattr(MemoryAgent, "hello", silent)
        looking = asyncio.create_task(yard.relink(made))
        await runtime.asked.wait()
        await yard.pausing.pause(made, memory=False)
        runtime.go.set()
        await looking
        assert made.state is State.PAUSED
        assert yard.look(made.id) is made


class FullRuntime(MemoryRuntime):
    """Its host has no room while `full`; `tried` counts what was asked of it then."""

    full = True
    tried = 0

    async def suspend(self, sandbox_id: str) -> None:
        if self.full:
            self.tried += 1
            raise HostFull(f"sandbox {sandbox_id} stands still", remedy="free space")
        await super().suspend(sandbox_id)


async def test_the_end_of_one_waits_for_room_to_pause_it(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pausing, "FULL_SECONDS", 0.1)
    runtime = FullRuntime(keeps_memory=True)
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted(policy=PAUSES, timeout=0.05))
        await until(lambda: runtime.tried > 0)
        assert runtime.tried == 1
        await until(lambda: runtime.tried > 2)
        assert made.state.alive
        with pytest.raises(HostFull):
            await yard.pausing.pause(made)
        assert runtime.tried < 8
        runtime.full = False
        await until(lambda: made.state is State.PAUSED)
        assert made.pause_mode is PauseMode.FULL


class SlowSuspends(MemoryRuntime):
    async def suspend(self, sandbox_id: str) -> None:
        await asyncio.sleep(0.2)
        await super().suspend(sandbox_id)


async def test_a_server_that_stops_brings_a_pause_to_its_end(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = SlowSuspends(keeps_memory=True)
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
        moving = asyncio.ensure_future(yard.pausing.pause(made))
        await asyncio.sleep(0.05)
        assert made.state is State.PAUSING
    await moving
    async with open_yard(runtime) as yard:
        assert yard.look(made.id).state is State.PAUSED


async def test_one_whose_link_is_looked_for_holds_up_no_other(
    open_yard: OpenYard, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneIsLate(LateRuntime):
        async def adopt(self, sandbox_id: str) -> Any:
            return await super().adopt(sandbox_id) if sandbox_id == slow.id else self.instances[sandbox_id]

    async def silent(_agent: MemoryAgent) -> dict[str, str]:
        raise AgentLinkError("no answer")

    runtime = OneIsLate()
    async with open_yard(runtime) as yard:
        slow, other = await yard.create(wanted()), await yard.create(wanted())
        monkeypatch.setattr(MemoryAgent, "hello", silent)
        looking = asyncio.create_task(yard.relink(slow))
        await runtime.asked.wait()
        await asyncio.wait_for(yard.relink(other), 5)
        assert other.state is State.RUNNING
        runtime.go.set()
        await looking
        assert not slow.state.alive
