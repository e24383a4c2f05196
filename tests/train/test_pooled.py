"""Rollouts in pooled envs: the same from this process and from four workers, and what a killed worker costs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sandyard.envs.base import Env
from sandyard.envs.embedded.blackjack import BlackjackEnv
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.sandbox import SandboxEnv
from sandyard.errors import ConfigError, Unsupported
from sandyard.tasks.base import Task
from sandyard.train.config import TrainConfig
from sandyard.train.deadlines import Deadlines
from sandyard.train.episode import system_and_user
from sandyard.train.metrics import rollout_metrics
from sandyard.train.policies.base import Policy
from sandyard.train.policies.chat import render_call
from sandyard.train.pooling import pooled_envs
from sandyard.train.rollout import RolloutEngine
from sandyard.train.testing import ScriptedPolicy
from sandyard.train.trajectory import EndReason, Trajectory
from tests.envs.pool.conftest import ray_up as ray_up
from tests.envs.pool.probes import ProbeEnv
from tests.train.tiny import make_policy

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ray_up")]

CONFIG = TrainConfig(batch_size=4, num_generations=2, max_tokens=120, max_turns=6)
REMOTE = {"ENV_REMOTE": "1", "ENV_NUM_WORKERS": "4", "ENV_POOL_SIZE": "0"}
TASKS = [Task(f"t{index}", "Play.") for index in range(4)]


def make_engine(policy: Policy, make_env: Callable[[], Env], config: TrainConfig = CONFIG) -> RolloutEngine:
    return RolloutEngine(policy, make_env, None, system_and_user("System."), config.rollout())


def what_counts(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [
        (t.prompt_ids, t.token_ids, t.mask, t.reward, t.earned, t.end_reason, t.turns, t.masked) for t in trajectories
    ]


def guess(text: str, seed: int) -> str:
    return render_call("guess", {"number": seed % 6 + 1})


def hit_or_stand(text: str, seed: int) -> str:
    return render_call("hit" if seed % 3 else "stand", {})


@pytest.mark.parametrize(
    ("factory", "script"),
    [(EnvFactory.of(GuessingEnv, limit=6), guess), (EnvFactory.of(BlackjackEnv), hit_or_stand)],
)
async def test_the_same_trajectories_without_a_pool_in_one_and_over_four_workers(
    factory: EnvFactory, script: Callable[[str, int], str]
) -> None:
    async def play(make_env: Callable[[], Env]) -> list[tuple[Any, ...]]:
        return what_counts(await make_engine(ScriptedPolicy(script), make_env).run(TASKS, 2, seed=11))

    remote = CONFIG.override(environ=REMOTE)
    assert (remote.env_remote, remote.env_workers, remote.pool().size) == (True, 4, 8)
    alone = await play(factory.make)
    async with pooled_envs(factory, CONFIG.override(environ={})) as make_env:
        assert await play(make_env) == alone
    async with pooled_envs(factory, remote) as make_env:
        assert await play(make_env) == alone
        assert await play(make_env) == alone
    assert len({row[3] for row in alone}) > 1
    assert len({tuple(row[1]) for row in alone}) > 4


async def test_a_sampled_policy_sees_and_says_the_same() -> None:
    config = replace(CONFIG, max_tokens=5, max_turns=2, batch_size=2)
    played = []
    for environ in ({}, REMOTE):
        async with pooled_envs(EnvFactory.of(GuessingEnv), config.override(environ=environ)) as make_env:
            engine = make_engine(make_policy(), make_env, config)
            played.append(await engine.run(TASKS[:2], 2, seed=3))
    assert what_counts(played[0]) == what_counts(played[1])
    # What happened to be computed together differs, and with it the last digits.
    for here, there in zip(*played, strict=True):
        assert here.logprobs == pytest.approx(there.logprobs, abs=1e-5)


async def test_rollouts_of_a_task_start_alike_and_tasks_do_not() -> None:
    """The env's seed is the group's, as what it is compared with must be: only the policy's differs."""
    policy = ScriptedPolicy([render_call("seed", {}), render_call("finish", {"how": "so"})])
    seen = [
        [policy.decode(t.token_ids) for t in await make_engine(policy, ProbeEnv).run(TASKS[:2], 3, seed=seed)]
        for seed in (1, 1, 2)
    ]
    assert seen[0] == seen[1] != seen[2]
    assert [len({*group}) for group in (seen[0][:3], seen[0][3:], seen[0])] == [1, 1, 2]


async def test_a_smaller_pool_takes_turns() -> None:
    config = CONFIG.override(environ={**REMOTE, "ENV_POOL_SIZE": "3"})
    assert (config.rollout().env_concurrency, config.pool().size) == (3, 3)
    async with pooled_envs(EnvFactory.of(GuessingEnv), config) as make_env:
        played = await make_engine(ScriptedPolicy(guess), make_env, config).run(TASKS, 2, seed=11)
    alone = await make_engine(ScriptedPolicy(guess), GuessingEnv).run(TASKS, 2, seed=11)
    assert what_counts(played) == what_counts(alone)


async def test_a_worker_killed_in_mid_batch_costs_its_slots_and_the_run_goes_on() -> None:
    all_in_their_second_turn, second_turns = asyncio.Event(), 0

    def script(text: str, seed: int) -> str:
        nonlocal second_turns
        answers = text.count("tool: napped")
        second_turns += answers == 1
        if second_turns == 8:
            all_in_their_second_turn.set()
        return render_call("nap", {}) if answers < 2 else render_call("finish", {"how": "so"})

    async with EnvPool(EnvFactory.of(ProbeEnv), CONFIG.override(environ=REMOTE).pool()) as pool:
        engine = make_engine(ScriptedPolicy(script), pool.lease)
        running = asyncio.create_task(engine.run(TASKS, 2, seed=1))
        await all_in_their_second_turn.wait()
        victim = pool.pids()[2]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        trajectories = await running
        masked = [t.masked for t in trajectories if t.masked is not None]
        assert masked == ["sandbox:env"] * 2
        assert all("the worker is gone" in str(t.detail) and t.reward is None for t in trajectories if t.masked)
        assert all(t.end_reason is EndReason.DONE for t in trajectories if not t.masked)
        metrics = rollout_metrics(trajectories, 0)
        assert (metrics["train/masked"], metrics["train/masked/sandbox:env"], metrics["env/failures"]) == (2, 2, 2)
        again = await engine.run(TASKS, 2, seed=2)
        assert [t.masked for t in again] == [None] * 8


async def test_envs_on_a_server_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"SandboxEnv cannot be pooled.*turn ENV_REMOTE off"):
        async with pooled_envs(EnvFactory.of(SandboxEnv), CONFIG.override(environ=REMOTE)):
            pass


async def test_rewards_are_summed_over_the_episode_and_none_is_lost() -> None:
    count, fail = render_call("count", {}), render_call("fail", {"how": "died"})
    nan, finish = render_call("fail", {"how": "nan"}), render_call("finish", {"how": "so"})

    async def play(*turns: str) -> Trajectory:
        (trajectory,) = await make_engine(ScriptedPolicy(turns), ProbeEnv).run(TASKS[:1], 1)
        return trajectory

    # Whichever tool acted last: `finish` earns nothing and takes nothing.
    assert (await play(count, count, finish)).reward == 3.0
    assert (await play(count + count, "I am done.")).reward == 3.0
    nothing = await play(finish)
    assert (nothing.reward, nothing.earned) == (0.0, None)
    lost = await play(count, fail)
    assert (lost.reward, lost.masked) == (None, "sandbox:oom")
    poisoned = await play(count, nan)
    assert (poisoned.reward, poisoned.masked) == (None, "verifier")


async def test_a_tool_that_may_outlast_its_step_is_refused_at_once() -> None:
    config = replace(CONFIG, deadlines=Deadlines(exec=10, step=50, rollout=100, batch=200))
    with pytest.raises(ConfigError, match=r"tool wait may run 50 s, which must be below deadline step \(50 s\)"):
        await make_engine(ScriptedPolicy(["done"]), ProbeEnv, config).run(TASKS, 1)
