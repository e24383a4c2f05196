"""twinkle's own classes, alone, over envs of ours. Prints one line a check and ends with 1 if any failed."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import traceback
from collections.abc import Callable
from typing import Any

from twinkle.advantage import GRPOAdvantage
from twinkle_agentic.envs import Env, EnvTool, StepResult
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.tools.tool_manager import ToolManager

from sandyard.envs import tools as ours
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.factory import EnvFactory
from sandyard.envs.interop.twinkle import TwinkleEnv, TwinkleResult, TwinkleToolManager
from sandyard.envs.loop import LoopThread
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.pool.settings import PoolSettings
from sandyard.errors import SandboxError
from sandyard.tasks.base import Task
from sandyard.train.advantages import group_advantages
from tests.envs.pool.probes import ProbeEnv


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def seeded(trajectory: Any) -> Task | None:
    return Task("t", "", metadata={"seed": (trajectory or {}).get("seed", 0)})


def our_env_has_what_an_env_has() -> None:
    public = {name for name in vars(Env) if not name.startswith("_")}
    assert public <= set(dir(TwinkleEnv)), public
    names = [field.name for field in dataclasses.fields(StepResult)]
    assert names == [field.name for field in dataclasses.fields(TwinkleResult)], names
    with TwinkleEnv(GuessingEnv) as env:
        begun = env.reset({"messages": []})
        assert (begun.reward, begun.done, type(begun.observation)) == (0.0, False, str)


def its_tool_manager_plays_our_env() -> None:
    with TwinkleEnv(GuessingEnv, make_task=seeded) as env:
        for seed in (1, 2):
            env.reset({"seed": seed})
            tools = EnvTool.from_env(env)
            manager = ToolManager(tools)
            assert manager.names() == ["guess"]
            assert manager.tool_infos() == env.tools()
            low, high, text = 1, 100, ""
            while not tools[0].done:
                middle = (low + high) // 2
                text = manager(call("guess", f'{{"number": {middle}}}'))
                low, high = (middle + 1, high) if "Higher" in text else (low, middle - 1)
            assert text == "Right.", text
            assert (tools[0].episode_reward, env.episode_reward) == (1.0, 1.0)
            assert env.evaluate([{}, {}]) == [1.0, 1.0]


def a_mistake_of_the_policy_comes_back_as_text() -> None:
    with TwinkleEnv(GuessingEnv) as env:
        env.reset()
        manager = ToolManager(EnvTool.from_env(env))
        assert "is not of type 'integer'" in manager(call("guess", {"number": "x"}))
        assert "is a required property" in manager(call("guess", ""))
        assert not env.done


def rewards_add_up_whichever_tool_acted_last() -> None:
    with TwinkleEnv(ProbeEnv) as env:
        env.reset()
        manager = ToolManager(EnvTool.from_env(env))
        for name in ("count", "count", "pid"):
            manager(call(name, {}))
        assert env.episode_reward == 3.0
        assert env.evaluate([{}]) == [3.0]


def an_infrastructure_failure_keeps_the_account_and_gets_no_reward() -> None:
    with TwinkleEnv(ProbeEnv) as env:
        env.reset()
        manager = ToolManager(EnvTool.from_env(env))
        manager(call("count", {}))
        assert "not scored" in manager(call("fail", {"how": "died"}))
        assert (env.done, env.episode_reward) == (True, 1.0)
        with contextlib.suppress(SandboxError):
            raise AssertionError(f"it was scored: {env.evaluate([{}])}")
        assert env.failed is not None
        assert "oom" in env.failed
        env.reset()
        manager(call("count", {}))
        assert env.evaluate([{}]) == [1.0]


def our_tool_manager_serves_its_rollout() -> None:
    loop = LoopThread()
    env = ProbeEnv()
    loop.run(env.reset())
    manager: Any = TwinkleToolManager(ours.ToolManager(ours.EnvTool.from_env(env)), loop)
    theirs = {name for name in vars(ToolManager) if not name.startswith("_")}
    assert theirs <= set(dir(TwinkleToolManager)), theirs
    assert MultiTurnRollout._resolve_tool_managers([manager, manager.copy()], 2)[0] is manager
    empty: tuple[object, ...] = ("", None, {}, "{}")
    assert [manager(call("count", arguments)) for arguments in empty] == ["1", "2", "3", "4"]
    assert manager.episode_reward == 10.0
    assert "There is no tool 'cuont'" in manager(call("cuont", {}))
    loop.run(env.close())
    loop.close()


def slots_of_a_pool_have_their_tools() -> None:
    loop = LoopThread()
    pool = EnvPool(EnvFactory.of(GuessingEnv), PoolSettings(size=2))
    loop.run(pool.__aenter__())
    for seed in (1, 2):
        with TwinkleEnv(pool.lease, make_task=seeded, loop=loop) as env:
            env.reset({"seed": seed})
            manager = ToolManager(EnvTool.from_env(env))
            assert manager(call("guess", {"number": 0})).startswith("Higher"), manager.names()
    loop.run(pool.close())
    loop.close()


def advantages_agree_where_its_are_right() -> None:
    rewards = [0.0, 1.0, 1.0, 0.1, 0.5, 0.1, 1.0, 0.3]
    theirs = GRPOAdvantage()(rewards, num_generations=4, scale="group").tolist()
    mine = group_advantages(rewards, 4, "group").values
    assert max(abs(a - b) for a, b in zip(theirs, mine, strict=True)) < 1e-3, (theirs, mine)
    equal = [group_advantages([value] * 8, 8, "group").values for value in (0.1, 0.7, 1 / 3)]
    assert all(set(values) == {0.0} for values in equal), equal


CHECKS: list[Callable[[], None]] = [
    our_env_has_what_an_env_has,
    its_tool_manager_plays_our_env,
    a_mistake_of_the_policy_comes_back_as_text,
    rewards_add_up_whichever_tool_acted_last,
    an_infrastructure_failure_keeps_the_account_and_gets_no_reward,
    our_tool_manager_serves_its_rollout,
    slots_of_a_pool_have_their_tools,
    advantages_agree_where_its_are_right,
]


def main() -> int:
    failed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            check()
        except Exception as error:  # noqa: BLE001  whatever a check meets is its result
            failed += 1
            traceback.print_exc()
            print(f"FAIL {name}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print(f"ok {name}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
