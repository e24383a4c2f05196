"""Pools: every promise on both kinds of workers, which nobody must be able to tell apart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from sandyard.envs.base import Env, Execution, StepStatus
from sandyard.envs.embedded.blackjack import BlackjackEnv
from sandyard.envs.embedded.maze import MazeEnv
from sandyard.envs.factory import EnvFactory
from sandyard.envs.openenv.client import OpenEnvClient
from sandyard.envs.pool.base import WorkerLost
from sandyard.envs.pool.pool import EnvPool, SlotCall, SlotProgram
from sandyard.envs.pool.settings import PoolSettings
from sandyard.envs.sandbox import SandboxEnv
from sandyard.errors import (
    BadRequest,
    CapacityError,
    ConfigError,
    Conflict,
    CreateFailed,
    DeathReason,
    SandboxDied,
    SandboxError,
    Unsupported,
    VerifierError,
)
from sandyard.tasks.base import Task
from tests.envs.pool.conftest import OpenPool
from tests.envs.pool.probes import ProbeEnv, Wedged, make_elsewhere, make_nothing

pytestmark = pytest.mark.timeout(120)


def count(*slots: int) -> list[SlotCall]:
    return [SlotCall(slot, "count") for slot in slots]


async def observed(pool: EnvPool, calls: list[SlotCall]) -> list[str]:
    return [result.observation for result in await pool.step_batch(calls)]


async def test_answers_come_in_the_order_of_the_request(open_pool: OpenPool) -> None:
    async with open_pool(size=5, workers=2) as pool:
        await pool.reset_batch([None] * 5)
        assert await observed(pool, count(1, 1, 1, 3)) == ["1", "2", "3", "1"]
        assert await observed(pool, count(4, 3, 2, 1, 0)) == ["1", "2", "1", "4", "1"]
        programs = [SlotProgram(3, "three"), SlotProgram(0, "zero")]
        assert await pool.execute_batch(programs) == [Execution("three", "2", 0), Execution("zero", "1", 0)]
        tasks = [Task("a", "First."), Task("b", "Second.")]
        assert [r.observation for r in await pool.reset_batch(tasks, [4, 1])] == ["First.", "Second."]
        assert await observed(pool, count(1, 2)) == ["1", "2"]


async def test_slots_are_worked_on_side_by_side(open_pool: OpenPool) -> None:
    async with open_pool(size=4, workers=2) as pool:
        await pool.reset_batch([None] * 4)
        naps = [r.info for r in await pool.step_batch([SlotCall(slot, "nap") for slot in range(4)])]
        assert max(nap["from"] for nap in naps) < min(nap["to"] for nap in naps)


async def test_an_index_out_of_range_is_refused_before_anything_is_done(open_pool: OpenPool) -> None:
    async with open_pool(size=4) as pool:
        await pool.reset_batch([None] * 4)
        for slot in (-1, 4, 100, True):
            with pytest.raises(BadRequest, match=f"slot {slot} is out of range: the pool has 4"):
                await pool.step_batch([*count(0), SlotCall(slot, "count")])
            with pytest.raises(BadRequest, match="out of range"):
                await pool.reset_batch([None], [slot])
            with pytest.raises(BadRequest, match="out of range"):
                await pool.execute_batch([SlotProgram(slot, "x")])
            with pytest.raises(BadRequest, match="2 tasks for 1 slots"):
                await pool.reset_batch([None, None], [0])
        assert await observed(pool, count(0)) == ["1"]


FAILURES: list[tuple[str, type[Exception], str]] = [
    ("died", SandboxDied, r"sandbox s1 died: oom \(too big\)"),
    ("full", CapacityError, "full"),
    ("own", RuntimeError, "tests.envs.pool.probes.OwnError: of mine 3"),
    ("exit", RuntimeError, "builtins.SystemExit: 3"),
    ("unpicklable", TypeError, "the env's answer cannot leave its process"),
    ("nan", VerifierError, "reward nan"),
    ("else", KeyError, "else"),
]


async def test_a_slots_failure_is_typed_and_its_own(open_pool: OpenPool) -> None:
    async with open_pool(size=3) as pool:  # one for all of them: workers take a second or two to start
        for how, kind, text in FAILURES:
            await pool.reset_batch([None] * 3)
            first, failed, last = await pool.step_batch([*count(0), SlotCall(1, "fail", {"how": how}), *count(2)])
            assert (first.observation, last.observation) == ("1", "1"), how
            assert (failed.status, failed.reward, failed.done) == (StepStatus.INFRA_ERROR, None, False), how
            assert type(failed.info["error"]) is kind, how
            assert failed.observation.startswith("slot 1: "), how
            # The same as an env raises it, for those who know what to do about it.
            with pytest.raises(kind, match=text) as caught:
                await pool.env(1).step("fail", {"how": how})
            if isinstance(caught.value, CapacityError):
                assert caught.value.retry_after == 7.0
            if isinstance(caught.value, SandboxDied):
                assert (caught.value.reason, caught.value.sandbox_id) == (DeathReason.OOM, "s1")
            await pool.reset_batch([None], [1])
            assert await observed(pool, count(1, 0)) == ["1", "2"], how


async def test_failures_of_reset_and_execute(open_pool: OpenPool) -> None:
    async with open_pool(size=3, fail_reset="bad") as pool:
        results = await pool.reset_batch([Task("a", "A"), Task("bad", "B"), Task("c", "C")])
        assert [result.status for result in results] == [StepStatus.OK, StepStatus.INFRA_ERROR, StepStatus.OK]
        assert isinstance(results[1].info["error"], CreateFailed)
        assert results[1].info["error"].stage == "start"
        with pytest.raises(Conflict, match="reset"):
            await pool.env(1).step("count", {})
        good, bad = await pool.execute_batch([SlotProgram(0, "x"), SlotProgram(2, "raise")])
        assert isinstance(good, Execution)
        assert isinstance(bad, SandboxDied)


async def test_a_step_before_reset_and_after_close(open_pool: OpenPool) -> None:
    async with open_pool(size=2) as pool:
        (early,) = await pool.step_batch(count(1))
        assert isinstance(early.info["error"], Conflict)
        env = pool.env(0)
        await env.reset()
        assert (await env.step("count", {})).observation == "1"
        await env.close()
        await env.close()
        with pytest.raises(Conflict):
            await env.step("count", {})
    with pytest.raises(Conflict, match="pool is closed"):
        await env.reset()
    for use in (pool.lease, lambda: pool.env(0)):
        with pytest.raises(Conflict, match="pool is closed"):
            use()
    await pool.close()


async def test_tools_are_seen_through_the_adapter_before_and_after_reset(open_pool: OpenPool) -> None:
    specs = list(ProbeEnv().tools())
    async with open_pool(size=1) as pool:
        lease = pool.lease()
        for env in (pool.env(0), lease):
            assert list(env.tools()) == specs
            assert env.time_limits() == {"wait": 50.0}
        await lease.reset()
        assert list(lease.tools()) == specs
        wrong = await lease.step("cuont", {})
        assert (wrong.status, "Did you mean count?" in wrong.observation) == (StepStatus.INVALID_CALL, True)
        assert lease.submission is None
        assert (await lease.step("finish", {"how": "so"})).terminated
        assert lease.submission == "so"
        assert (await lease.step("count", {})).status is StepStatus.INVALID_CALL
        await lease.close()
        assert lease.submission == "so"


async def test_a_lease_waits_for_a_slot_and_gives_it_back(open_pool: OpenPool) -> None:
    async with open_pool(size=2, workers=1) as pool:
        first, second, third, fourth = (pool.lease() for _ in range(4))
        await first.reset()
        await second.reset()
        with pytest.raises(Conflict, match="lent out"):
            await pool.step_batch(count(0))
        given_up, waiting = asyncio.create_task(third.reset()), asyncio.create_task(fourth.reset())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        given_up.cancel()
        await asyncio.wait([given_up])
        await second.step("count", {})
        await second.close()
        await waiting
        assert (await fourth.step("count", {})).observation == "1"  # nothing of the episode before
        for env in (first, fourth, third):
            await env.close()
        assert [r.status for r in await pool.reset_batch([None, None])] == [StepStatus.OK] * 2
        with pytest.raises(Conflict, match="reset"):
            await first.step("count", {})


async def test_a_call_that_is_given_up_ends_the_episode_and_not_the_slot(open_pool: OpenPool) -> None:
    async with open_pool(size=1) as pool:
        env = pool.env(0)
        await env.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await env.step("wait", {})
        with pytest.raises(SandboxError, match="given up"):
            await env.step("count", {})
        await env.reset()
        assert (await env.step("count", {})).observation == "1"


async def test_seeds_are_those_of_the_task_else_of_the_slot(open_pool: OpenPool) -> None:
    async def seeds(seed: int) -> list[list[str]]:
        async with open_pool(size=3, seed=seed) as pool:
            rounds = []
            for _ in range(2):
                await pool.reset_batch([None, Task("t", "", metadata={"seed": 5}), None])
                rounds.append(await observed(pool, [SlotCall(slot, "seed") for slot in range(3)]))
            return rounds

    first, again, other = await seeds(1), await seeds(1), await seeds(2)
    assert first == again
    assert [found[1] for found in first] == ["5", "5"]
    drawn = {found[slot] for rounds in (first, other) for found in rounds for slot in (0, 2)}
    assert len(drawn) == 8
    assert all(0 <= int(number) < 1 << 31 for number in drawn)


async def test_every_episode_of_a_slot_has_a_seed_of_its_own(open_pool: OpenPool) -> None:
    tell = [SlotCall(0, "seed")]
    async with open_pool(size=1) as pool:
        one_by_one = []
        for _ in range(3):
            await pool.reset_batch([None])
            one_by_one += await observed(pool, tell)
    async with open_pool(size=1) as pool:
        await pool.reset_batch([None, None], [0, 0])
        assert await observed(pool, tell) == one_by_one[1:2]
    assert len(set(one_by_one)) == 3


@pytest.mark.parametrize(
    ("factory", "where"),
    [
        (EnvFactory.of(SandboxEnv), "in a sandbox of the server"),
        (EnvFactory.of(OpenEnvClient, base_url="http://127.0.0.1:1"), "in a session of the OpenEnv server"),
        (EnvFactory.of(make_elsewhere), "on the moon"),
    ],
)
async def test_envs_on_a_server_are_refused_with_the_reason(factory: EnvFactory, where: str) -> None:
    with pytest.raises(Unsupported, match=f"cannot be pooled: its episode is {where}.*ENV_REMOTE"):
        async with EnvPool(factory):
            pass


async def test_refused_by_a_worker_too(open_pool: OpenPool) -> None:
    with pytest.raises(Unsupported, match="on the moon"):
        async with open_pool(kind=make_elsewhere):
            pass
    maker: Callable[..., Any] = make_nothing
    with pytest.raises(ConfigError, match="is a dict, not a"):
        async with open_pool(kind=maker):
            pass


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nothing", "not of the form module:attribute"),
        ("no.such.module:X", "no.such.module"),
        ("sandyard.envs.memory:Nope", "Nope"),
        ("sandyard.envs.memory:_CHUNK", "not a class or a function"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EnvPool(EnvFactory(name))


def test_what_cannot_be_imported_elsewhere_is_refused() -> None:
    def inner() -> Env:
        return ProbeEnv()

    with pytest.raises(ConfigError, match="cannot be imported elsewhere"):
        EnvFactory.of(inner)


def test_settings_of_the_environment() -> None:
    found = PoolSettings.from_environ({"ENV_REMOTE": "1", "ENV_NUM_WORKERS": "3", "ENV_POOL_SIZE": "0"})
    assert (found.remote, found.workers, found.size) == (True, 3, 0)
    assert found.for_trajectories(24).size == 24
    assert PoolSettings.from_environ({"ENV_POOL_SIZE": "7"}, workers=2).for_trajectories(24).size == 7
    assert PoolSettings.from_environ({}) == PoolSettings(size=0, workers=4, remote=False)
    assert not PoolSettings.from_environ({"ENV_REMOTE": "false"}).remote
    for environ in ({"ENV_REMOTE": "maybe"}, {"ENV_NUM_WORKERS": "two"}, {"ENV_NUM_WORKERS": "0"}):
        with pytest.raises(ConfigError, match=r"ENV_|workers"):
            PoolSettings.from_environ(environ)


async def _play(pool: EnvPool, seeds: list[int]) -> list[list[Any]]:
    """Episodes of moves that depend on what was seen, to their end."""
    results = await pool.reset_batch([Task("t", "", metadata={"seed": seed}) for seed in seeds])
    games = [[result] for result in results]
    for _ in range(40):
        live = [slot for slot, game in enumerate(games) if not game[-1].done]
        calls = [SlotCall(slot, *_move(pool, games[slot][-1].observation)) for slot in live]
        for slot, result in zip(live, await pool.step_batch(calls), strict=True):
            games[slot].append(result)
    return [list(game) for game in games]


def _move(pool: EnvPool, text: str) -> tuple[str, dict[str, str]]:
    if pool.tools()[0].name == "walk":
        return "walk", {"direction": text.rsplit("Ways: ", 1)[1].split(",")[-1].strip(" .")}
    return ("hit" if len(text) % 3 else "stand"), {}


@pytest.mark.parametrize("kind", [BlackjackEnv, MazeEnv])
async def test_the_same_episodes_on_four_workers_as_in_this_process(ray_up: None, kind: type[Env]) -> None:
    played = []
    for remote in (False, True):
        settings = PoolSettings(size=8, workers=4, remote=remote)
        async with EnvPool(EnvFactory.of(kind), settings) as pool:
            assert len(set(pool.pids())) == (4 if remote else 1)
            played.append(await _play(pool, list(range(8))))
    assert played[0] == played[1]


async def test_a_killed_worker_costs_its_own_slots_their_episodes(ray_up: None) -> None:
    async with EnvPool(EnvFactory.of(ProbeEnv), PoolSettings(size=8, workers=4, remote=True)) as pool:
        await pool.reset_batch([None] * 8)
        victim = pool.pids()[1]
        assert victim is not None
        batch = asyncio.create_task(pool.step_batch([SlotCall(slot, "nap") for slot in range(8)]))
        await asyncio.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        results = await batch
        lost = [slot for slot, result in enumerate(results) if result.status is StepStatus.INFRA_ERROR]
        assert lost == [1, 5]
        assert all(isinstance(results[slot].info["error"], WorkerLost) for slot in lost)
        # Never a new episode in silence: the lost ones stay lost until they are reset.
        assert [r.observation for r in await pool.step_batch(count(0, 2, 3))] == ["1", "1", "1"]
        assert [r.status for r in await pool.step_batch(count(1, 5))] == [StepStatus.INFRA_ERROR] * 2
        with pytest.raises(WorkerLost):
            await pool.env(1).execute("x")
        assert [r.status for r in await pool.reset_batch([None, None], [1, 5])] == [StepStatus.OK] * 2
        assert await observed(pool, count(1, 5, 0)) == ["1", "1", "2"]
        assert pool.pids()[1] != victim


async def test_a_worker_that_died_between_episodes_is_nobodys_loss(ray_up: None) -> None:
    async with EnvPool(EnvFactory.of(ProbeEnv), PoolSettings(size=2, workers=2, remote=True)) as pool:
        await pool.reset_batch([None, None])
        assert (await pool.step_batch([SlotCall(1, "fail", {"how": "exit_process"})]))[0].status is (
            StepStatus.INFRA_ERROR
        )
        victim = pool.pids()[0]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        results = await pool.reset_batch([None, None])
        assert [result.status for result in results] == [StepStatus.OK] * 2
        assert await observed(pool, count(0, 1)) == ["1", "1"]


async def test_a_worker_that_does_not_answer_is_replaced(ray_up: None) -> None:
    settings = PoolSettings(size=3, workers=2, remote=True, close_timeout=0.2)
    async with EnvPool(EnvFactory.of(Wedged), settings) as pool:
        await pool.reset_batch([None] * 3)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await pool.env(0).step("wedge", {})
        await pool.env(0).close()
        assert [r.status for r in await pool.step_batch(count(1, 2))] == [StepStatus.OK, StepStatus.INFRA_ERROR]
        await pool.reset_batch([None, None], [0, 2])
        assert await observed(pool, count(0, 1, 2)) == ["1", "2", "1"]
