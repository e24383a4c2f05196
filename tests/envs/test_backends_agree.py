"""The same tests on every back end: where two differ, the table of `sandyard envs describe` says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
from typer.testing import CliRunner

from sandyard.cli.app import build_app
from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.envs.backends import Backend, known_backends, load_backend
from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.base import StepStatus
from sandyard.envs.toolenv import ToolEnv
from sandyard.images.base import build_base
from sandyard.tasks.base import Task
from tests.envs.helpers import hold_to_its_word

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

TASK = Task("t", "Write f(x) that doubles x.", tests=("assert f(2) == 4",))
KEPT, FRESH = "kept", "fresh process"


@dataclass(frozen=True)
class Form:
    """A back end in one of its forms."""

    name: str
    state: str
    options: Mapping[str, Any]

    @property
    def backend(self) -> Backend:
        return load_backend(self.name)


FORMS = [
    Form("memory", FRESH, {}),
    Form("interpreter", KEPT, {}),
    Form("process", KEPT, {}),
    Form("process", FRESH, {"persistent": False}),
    Form("sandbox", FRESH, {}),
    Form("sandbox", KEPT, {"persistent": True}),
]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: f"{form.name}-{form.state.split()[0]}")
def form(request: pytest.FixtureRequest) -> Form:
    chosen: Form = request.param
    return chosen


@pytest.fixture
async def make(form: Form, request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., ToolEnv]]:
    """Makes envs of the form; all of them are closed again."""
    options = dict(form.options)
    if form.name == "sandbox":
        await build_base(Settings())  # on first use, which takes a minute or two
        connection: Connection = request.getfixturevalue("connection")
        options |= {"api_url": connection.api_url, "api_key": connection.api_key}
    made: list[ToolEnv] = []

    def make_one(run_timeout: float = 20.0) -> ToolEnv:
        made.append(form.backend.make_env(run_timeout=run_timeout, **options))
        return made[-1]

    try:
        yield make_one
    finally:
        await asyncio.gather(*(env.close() for env in made))


@pytest.fixture
async def env(make: Callable[..., ToolEnv]) -> ToolEnv:
    env = make()
    await env.reset(TASK)
    return env


async def run(env: ToolEnv, code: str) -> str:
    return (await env.step("run_python", {"code": code})).observation


async def test_an_episode(env: ToolEnv) -> None:
    assert [spec.name for spec in env.tools()] == ["run_python", "submit_solution"]
    good = await env.step("run_python", {"code": "def f(x):\n    return x * 2\nprint(f(2))"})
    assert (good.observation, good.status, good.done) == ("4", StepStatus.OK, False)
    assert await run(env, "x = 1") == "(no output)"
    bad = await env.step("run_python", {"code": "1 / 0"})
    assert bad.status is StepStatus.TASK_FAILED
    assert "ZeroDivisionError: division by zero" in bad.observation
    done = await env.step("submit_solution", {"code": "def f(x): return x * 2"})
    assert (done.terminated, done.reward, env.submission) == (True, None, "def f(x): return x * 2")
    assert (await env.step("run_python", {"code": "1"})).status is StepStatus.INVALID_CALL


async def test_wrong_calls_are_answers(env: ToolEnv) -> None:
    assert (await env.step("run_python", {"source": "1"})).status is StepStatus.INVALID_CALL
    assert (await env.step("run_shell", {"code": "1"})).status is StepStatus.INVALID_CALL
    assert (await env.step("run_python", {"code": "def"})).status is not StepStatus.OK


async def test_the_prompt_of_fresh_runs_is_true(form: Form, make: Callable[..., ToolEnv]) -> None:
    if form.state != FRESH:
        pytest.skip("the tests below hold the other prompts to their word")
    env = make(run_timeout=1.0)
    await env.reset()
    await hold_to_its_word(env, form.backend.system_prompt(max_turns=4, run_timeout=1, **form.options))


async def test_state_is_as_the_prompt_says(form: Form, env: ToolEnv) -> None:
    prompt = form.backend.system_prompt(max_turns=3, run_timeout=5, **form.options)
    assert ("share one session" in prompt, "fresh process" in prompt) == (form.state == KEPT, form.state == FRESH)
    await run(env, "import math\nx = 41\ndef g(y):\n    return y + 1")
    answer = await run(env, "print(g(x), math.floor(2.5))")
    assert answer == "42 2" if form.state == KEPT else "NameError" in answer
    await run(env, "raise ValueError('a')")
    assert ("NameError" in await run(env, "print(x)")) == (form.state == FRESH)


async def test_an_episode_begins_without_names(env: ToolEnv) -> None:
    await run(env, "x = 1")
    await env.reset(TASK)
    assert "NameError" in await run(env, "print(x)") or "not defined" in await run(env, "print(x)")


async def test_files_stay_where_there_are_files(form: Form, env: ToolEnv) -> None:
    answer = await env.step("run_python", {"code": "f = open('kept', 'w')\nn = f.write('here')\nf.close()"})
    if form.backend.SEMANTICS.files == "none":
        assert answer.status is StepStatus.UNSUPPORTED
        return
    assert await run(env, "print(open('kept').read())") == "here"
    await env.reset(TASK)
    assert "FileNotFoundError" in await run(env, "open('kept')")


async def test_a_loop_without_end_ends_the_step(make: Callable[..., ToolEnv]) -> None:
    env = make(run_timeout=2.0)
    await env.reset(TASK)
    stopped = await env.step("run_python", {"code": "x = 1\nwhile True:\n    x = x + 1"})
    assert stopped.status is StepStatus.TIMEOUT
    assert "[stopped" in stopped.observation
    assert await run(env, "print(3)") == "3"


async def test_lost_state_is_said(form: Form, make: Callable[..., ToolEnv]) -> None:
    if form.state == FRESH or form.name == "interpreter":
        pytest.skip("a program cannot end the session, or is refused")
    env = make(run_timeout=1.0)
    await env.reset(TASK)
    stubborn = "while True:\n  try:\n    while True:\n      x = 1\n  except KeyboardInterrupt:\n    x = 2"
    for ending, status in ((stubborn, StepStatus.TIMEOUT), ("import os; os._exit(3)", StepStatus.TASK_FAILED)):
        result = await env.step("run_python", {"code": f"y = 1\n{ending}"})
        assert (result.status, result.info["state_lost"]) == (status, True), result
        assert "names" in result.observation
        assert "are gone" in result.observation
        assert "NameError" in await run(env, "print(y)")


async def test_an_exit_ends_the_run_only(form: Form, env: ToolEnv) -> None:
    ended = await env.step("run_python", {"code": "import sys\nx = 1\nsys.exit(3)"})
    if form.name == "interpreter":
        assert ended.status in (StepStatus.TASK_FAILED, StepStatus.UNSUPPORTED)
        return
    assert (ended.status, ended.info["exit_code"]) == (StepStatus.TASK_FAILED, 3)
    assert (await run(env, "print(x)") == "1") == (form.state == KEPT)


async def test_input_is_empty_and_output_bounded(form: Form, env: ToolEnv) -> None:
    if form.name != "interpreter":
        assert "EOFError" in await run(env, "input()")
    long = await run(env, "print('x' * 50000)")
    assert len(long) <= env.observation_limit
    assert "cut" in long


async def test_raw_execution_tells_channels_and_code(form: Form, env: ToolEnv) -> None:
    raw = await env.execute("print('out')\nraise ValueError('no')")
    assert raw.stdout == "out\n"
    assert "ValueError: no" in raw.stderr
    assert (raw.exit_code, raw.timed_out) == (1, False)


async def test_the_network_is_as_the_table_says(form: Form, env: ToolEnv) -> None:
    if form.backend.SEMANTICS.network.startswith("that of this machine"):
        pytest.skip("it has this machine's network")
    probe = "import socket\nsocket.create_connection(('192.0.2.1', 53), timeout=1)\nprint('connected')"
    assert "connected" not in await run(env, probe)


async def test_modules_are_as_the_table_says(form: Form, env: ToolEnv) -> None:
    answer = await env.step("run_python", {"code": "import json, collections\nprint(json.dumps([1]))"})
    assert answer.observation == "[1]" or answer.status is StepStatus.UNSUPPORTED
    own = await run(env, "import pydantic\nprint('found')")
    assert ("found" in own) == (form.backend.SEMANTICS.modules == "those of this machine")


async def test_a_decorator_runs_or_is_refused(form: Form, env: ToolEnv) -> None:
    code = "def twice(f):\n    return lambda x: f(x) * 2\n@twice\ndef g(x):\n    return x\nprint(g(3))"
    answer = await env.step("run_python", {"code": code})
    if form.backend.SEMANTICS.language.startswith("CPython"):
        assert answer.observation == "6"
    else:
        assert answer.status is StepStatus.UNSUPPORTED


def test_the_table_is_shown_whole() -> None:
    shown = CliRunner().invoke(build_app(), ["envs", "describe"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    for name in known_backends():
        assert name in shown.output
        semantics = load_backend(name).SEMANTICS
        for field in fields(Semantics):
            assert field.name in shown.output
            assert getattr(semantics, field.name) in shown.output
