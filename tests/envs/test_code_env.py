"""The code recipe's env: its tools, its end, and that its prompt says what is true."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from sandyard.envs.backends import known_backends, load_backend, memory, sandbox
from sandyard.envs.base import StepStatus
from sandyard.envs.memory import MemoryCodeEnv
from sandyard.envs.sync import SyncEnv
from sandyard.errors import ConfigError, Conflict
from sandyard.tasks.base import Task
from sandyard.verify.local import local_verifier
from sandyard.verify.shaping import score
from tests.envs.helpers import hold_to_its_word

TASK = Task("t", "Write f(x) that doubles x.", tests=("assert f(2) == 4", "assert f(0) == 0"))


async def test_an_episode() -> None:
    async with MemoryCodeEnv() as env:
        assert (await env.reset(TASK)).observation == TASK.prompt
        assert env.submission is None
        ran = await env.step("run_python", {"code": "def f(x): return x * 2\nprint(f(2))"})
        assert (ran.observation, ran.status, ran.done) == ("4", StepStatus.OK, False)
        wrong = await env.step("run_python", {"code": "1 / 0"})
        assert wrong.status is StepStatus.TASK_FAILED
        assert "ZeroDivisionError" in wrong.observation
        done = await env.step("submit_solution", {"code": "def f(x): return x * 2"})
        assert done.terminated
        assert done.reward is None
        late = await env.step("submit_solution", {"code": "something else"})
        assert late.status is StepStatus.INVALID_CALL
        assert env.submission == "def f(x): return x * 2"
        await env.reset(TASK)
        assert env.submission is None


async def test_what_is_submitted_never_runs_in_the_env(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: MemoryCodeEnv, code: str, *, timeout: float | None = None) -> None:
        raise AssertionError("executed")

    monkeypatch.setattr(MemoryCodeEnv, "execute", never)
    async with MemoryCodeEnv() as env:
        await env.reset(TASK)
        assert (await env.step("submit_solution", {"code": "boom()"})).terminated


async def test_execute_is_outside_the_episode() -> None:
    async with MemoryCodeEnv() as env:
        await env.reset(TASK)
        await env.step("submit_solution", {"code": "x"})
        raw = await env.execute("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.exit(3)")
        assert (raw.stdout, raw.stderr, raw.exit_code) == ("out\n", "err\n", 3)


async def test_a_run_too_long_is_stopped_with_its_output_kept() -> None:
    async with MemoryCodeEnv(run_timeout=0.5) as env:
        await env.reset(TASK)
        result = await env.step("run_python", {"code": "import time\nprint('first')\ntime.sleep(60)"})
        assert result.status is StepStatus.TIMEOUT
        assert result.observation.startswith("first\n")


async def test_files_die_with_the_episode() -> None:
    env = MemoryCodeEnv()
    await env.reset()
    where = (await env.execute("import os\nopen('f', 'w').close()\nprint(os.getcwd())")).stdout.strip()
    assert "sandyard-memory-" in where
    await env.reset()
    assert not os.path.exists(where)  # noqa: ASYNC240 - a test may block
    await asyncio.gather(env.close(), env.close())
    with pytest.raises(Conflict):
        await env.step("run_python", {"code": ""})


async def test_a_registered_tool_replaces_and_sees_the_env() -> None:
    def handler(env: MemoryCodeEnv, arguments: Mapping[str, Any]) -> str:
        return f"{env.task.task_id if env.task else None} {arguments['code']}"

    async with MemoryCodeEnv() as env:
        env.register_tool({"name": "run_python", "parameters": memory.TOOL_SCHEMA[0].parameters}, handler)
        await env.reset(TASK)
        assert (await env.step("run_python", {"code": "x"})).observation == "t x"
        assert [spec.name for spec in env.tools()] == ["run_python", "submit_solution"]


def test_the_back_end_is_chosen_by_name() -> None:
    assert load_backend("memory").NAME == memory.NAME
    assert load_backend(environ={"CODE_RL_BACKEND": "memory"}).NAME == memory.NAME
    assert load_backend(environ={}).NAME == sandbox.NAME
    with pytest.raises(ConfigError, match=r"'sandbx' \(from CODE_RL_BACKEND\); known: sandbox, process"):
        load_backend(environ={"CODE_RL_BACKEND": "sandbx"})


@pytest.mark.parametrize("name", known_backends())
def test_a_back_end_has_its_parts(name: str) -> None:
    backend = load_backend(name)
    assert name == backend.NAME
    assert [spec.name for spec in backend.TOOL_SCHEMA] == ["run_python", "submit_solution"]
    assert name in backend.describe()
    prompt = backend.system_prompt(max_turns=3, run_timeout=7)
    assert "You have 3 turns" in prompt
    assert "stopped after 7 seconds" in prompt


async def test_the_memory_prompt_is_true() -> None:
    async with memory.make_env(run_timeout=1) as env:
        await env.reset()
        await hold_to_its_word(env, memory.system_prompt(max_turns=4, run_timeout=1))


def test_the_synchronous_face() -> None:
    with SyncEnv(MemoryCodeEnv(), partial(score, local_verifier())) as env:
        env.reset(TASK)
        assert env.tools()[0]["function"]["name"] == "run_python"
        assert env.step("run_python", {"code": "print(1)"}).observation == "1"
        assert env.evaluate() == 0.0
        env.reset(TASK)
        env.step("submit_solution", {"code": "def f(x): return 4"})
        assert env.evaluate([]) == pytest.approx(0.3)
        assert env.execute("print(2)").stdout == "2\n"
    env.close()
    with pytest.raises(Conflict):
        env.reset()
