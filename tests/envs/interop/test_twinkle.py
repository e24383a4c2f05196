"""Our envs and tools with twinkle's manners, without twinkle's faults: each fault a test.

The real package runs the same envs in `python -m tests.compat --parts twinkle`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from sandyard.envs.base import StepResult, StepStatus, ToolSpec
from sandyard.envs.interop.twinkle import TwinkleEnv, TwinkleToolManager
from sandyard.envs.ledger import Ledger
from sandyard.envs.loop import LoopThread
from sandyard.envs.memory import MemoryCodeEnv
from sandyard.envs.sandbox import SandboxEnv
from sandyard.envs.sync import SyncEnv
from sandyard.envs.tools import EnvTool, ToolManager
from sandyard.errors import BadRequest, Conflict, SandboxDied, SandboxError, VerifierError
from sandyard.tasks.base import Task
from tests.envs.pool.probes import ProbeEnv

NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with_thread = LoopThread()
    yield with_thread
    with_thread.close()
    with_thread.close()


def rewarding(name: str, reward: float | None, ledger: Ledger | None = None, **result: Any) -> EnvTool:
    answer = StepResult(name, reward=reward, **result)
    tool = EnvTool(ToolSpec(name, "", NOTHING), lambda arguments: answer)
    if ledger is not None:
        tool.ledger = ledger
    return tool


async def test_the_reward_is_the_episodes_whichever_tool_acted_last() -> None:
    env = ProbeEnv()
    await env.reset()
    tools = {tool.spec.name: tool for tool in EnvTool.from_env(env)}
    manager = ToolManager(tools)
    for name in ("count", "count", "pid"):
        await manager.call(name, {})
    # All of them tell the same, those that never acted, too.
    assert {tool.episode_reward for tool in tools.values()} == {3.0}
    assert (manager.episode_reward, manager.done) == (3.0, False)
    last = tools["fail"].last_result
    assert last is not None
    assert last.observation == str(os.getpid())
    await manager.call("finish", {"how": "so"})
    assert (manager.done, tools["count"].done, manager.episode_reward) == (True, True, 3.0)
    await env.close()


async def test_what_comes_after_the_end_changes_nothing() -> None:
    env = ProbeEnv()
    await env.reset()
    manager = ToolManager(EnvTool.from_env(env))
    await manager.call("count", {})
    assert (await manager.call("finish", {"how": "so"})).terminated
    after = await manager.call("count", {})
    assert (after.status, after.observation) == (StepStatus.INVALID_CALL, "The episode is over.")
    assert (manager.episode_reward, env.submission) == (1.0, "so")
    await env.close()


async def test_an_infrastructure_error_takes_nothing_from_the_account() -> None:
    ledger = Ledger()
    tools = [rewarding("earn", 2.0, ledger), rewarding("break", None, ledger, status=StepStatus.INFRA_ERROR)]
    manager = ToolManager(tools)
    for name in ("earn", "break", "earn"):
        await manager.call(name, {})
    assert (manager.episode_reward, ledger.reward, ledger.failed) == (4.0, 4.0, "break")
    assert ledger.score is None  # and it is not scored all the same
    manager.begin()
    assert [manager.episode_reward, ledger.failed, ledger.score] == [None, None, 0.0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_that_would_poison_its_group_is_the_envs_failure(reward: float) -> None:
    with pytest.raises(VerifierError, match="not a finite number"):
        await ToolManager([rewarding("earn", reward)]).call("earn", {})


async def test_a_manager_of_several_envs_adds_their_accounts() -> None:
    shared = Ledger()
    manager = ToolManager(
        {"a": rewarding("a", 1.0, shared), "b": rewarding("b", 2.0, shared), "c": rewarding("c", 4.0)}
    )
    assert manager.episode_reward is None
    for name in ("a", "b", "c", "a"):
        await manager.call(name, {})
    assert manager.episode_reward == 8.0
    removed = manager.unregister("c")
    assert removed is not None
    assert removed.tool_info()["function"]["name"] == "c"
    assert manager.unregister("c") is None
    assert manager.episode_reward == 4.0


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(BadRequest, match="a timeout of"):
        EnvTool(ToolSpec("t", "", NOTHING), lambda arguments: "", timeout)


def test_an_env_writes_nothing_into_the_processs_environment() -> None:
    before = dict(os.environ)
    env = SandboxEnv("base", "http://127.0.0.1:9", "e2b_00", sandbox_envs={"A": "b"})
    assert env.connection.api_url == "http://127.0.0.1:9"
    assert dict(os.environ) == before


def test_an_env_as_twinkle_holds_it(loop: LoopThread) -> None:
    async def score(task: Task, submission: str | None) -> float:
        return float(submission == task.prompt)

    def task(trajectory: Mapping[str, Any] | None) -> Task:
        return Task("t", str((trajectory or {}).get("want", "")))

    with TwinkleEnv(MemoryCodeEnv, score=score, make_task=task, loop=loop) as env:
        for want, reward in (("x = 1", 1.0), ("x = 2", 0.0)):
            begun = env.reset({"want": want})
            assert (begun.observation, begun.reward, begun.done) == (want, 0.0, False)
            ran = env.step("run_python", {"code": "raise ValueError('no')"})
            assert ("ValueError: no" in ran.observation, ran.info["status"]) == (True, "task_failed")
            assert env.step("run_python").info["status"] == "invalid_call"
            assert env.step("submit_solution", {"code": "x = 1"}).done
            assert env.step("run_python", {"code": "1"}).observation == "The episode is over."
            assert env.evaluate([{}, {}]) == [reward, reward]
    with pytest.raises(Conflict):
        env.reset()


def test_a_lost_episode_ends_and_is_not_scored() -> None:
    with TwinkleEnv(ProbeEnv) as env:
        env.reset()
        assert env.step("count").info["episode_reward"] == 1.0
        lost = env.step("fail", {"how": "died"})
        assert (lost.done, lost.reward, lost.info["status"], lost.info["episode_reward"]) == (
            True, 0.0, "infra_error", 1.0,
        )  # fmt: skip
        assert "oom" in lost.info["error"]
        with pytest.raises(SandboxError, match="leave it out of its group"):
            env.evaluate([{}])
        assert env.reset().info["episode_reward"] == 0.0
        assert env.failed is None
    env.close()


def test_our_manager_in_a_synchronous_rollout(loop: LoopThread) -> None:
    env = ProbeEnv()
    loop.run(env.reset())
    manager = TwinkleToolManager(ToolManager(EnvTool.from_env(env)), loop)
    assert manager({"function": {"name": "count", "arguments": ""}}) == "1"
    assert "There is no tool" in manager({"function": {"name": "nothing", "arguments": "{}"}})
    assert "not JSON" in manager({"function": {"name": "count", "arguments": "{"}})
    with pytest.raises(SandboxDied):
        manager({"function": {"name": "fail", "arguments": {"how": "died"}}})
    assert (manager.done, manager.episode_reward) == (False, 1.0)
    assert manager.copy().names() == manager.names()
    loop.run(env.close())


def test_envs_on_one_loop_do_not_wait_for_each_other(loop: LoopThread) -> None:
    envs = [SyncEnv(ProbeEnv(), loop=loop) for _ in range(4)]
    naps: list[Mapping[str, Any]] = []

    def nap(env: SyncEnv) -> None:
        env.reset()
        naps.append(env.step("nap", {}).info)

    threads = [threading.Thread(target=nap, args=(env,)) for env in envs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(found["from"] for found in naps) < min(found["to"] for found in naps)
    for env in envs:
        env.close()
        env.close()


def test_a_call_has_its_time(loop: LoopThread) -> None:
    env = SyncEnv(ProbeEnv(), loop=loop)
    env.reset()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        env.step("wait", {}, timeout=0.2)
    assert time.monotonic() - started < 20
    env.close()
