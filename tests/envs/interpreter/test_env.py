"""The back end `interpreter`: an env, and a prompt that says what is true of it."""

from __future__ import annotations

import pytest

from sandyard.envs.backends import interpreter, load_backend
from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter.env import InterpreterCodeEnv


async def run(env: InterpreterCodeEnv, code: str) -> str:
    return (await env.step("run_python", {"code": code})).observation


async def test_the_prompt_is_true() -> None:
    assert load_backend("interpreter").NAME == "interpreter"
    prompt = interpreter.system_prompt(max_turns=4, run_timeout=1)
    async with interpreter.make_env(run_timeout=1) as env:
        await env.reset()
        assert "variables, functions and imports of an earlier run are still there" in prompt
        assert await run(env, "import math\nx = 4\ndef f(y):\n    return y + 1") == "(no output)"
        assert await run(env, "print(f(x), math.sqrt(x))") == "5 2.0"
        assert "no generators with yield, decorators, global or with" in prompt
        for code in ("def g():\n    yield 1", "@f\ndef g():\n    pass", "def g():\n    global x", "with x:\n    pass"):
            assert (await env.step("run_python", {"code": code})).status is StepStatus.UNSUPPORTED
        assert "no files and no standard input" in prompt
        assert "unsupported: builtin open at line 1" in await run(env, "open('f', 'w')")
        assert "unsupported: builtin input at line 1" in await run(env, "input()")
        assert "stopped after 1 seconds, and then all variables are gone" in prompt
        assert "[stopped after 1 s]\n[all names of earlier runs are gone]" in await run(env, "while True: pass")
        assert "NameError" in await run(env, "print(x)")


async def test_an_episode_begins_without_names_and_ends_with_a_submission() -> None:
    async with InterpreterCodeEnv() as env:
        await env.reset()
        await run(env, "x = 1")
        result = await env.step("submit_solution", {"code": "def f(x): return x"})
        assert result.terminated
        assert env.submission == "def f(x): return x"
        await env.reset()
        assert await run(env, "print(x)") == "NameError: name 'x' is not defined"


async def test_a_failure_and_long_output_are_shown_within_the_limit() -> None:
    async with InterpreterCodeEnv(observation_limit=300) as env:
        await env.reset()
        result = await env.step("run_python", {"code": "print('x' * 5000)\n1 / 0"})
        assert result.status is StepStatus.TASK_FAILED
        assert len(result.observation) <= 300
        assert result.observation.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "exit_code", "timed_out"), [("print(1)", 0, False), ("1 / 0", 1, False), ("eval('1')", None, False)]
)
async def test_raw_execution(code: str, exit_code: int | None, timed_out: bool) -> None:
    async with InterpreterCodeEnv() as env:
        await env.reset()
        execution = await env.execute(code)
        assert (execution.exit_code, execution.timed_out) == (exit_code, timed_out)
