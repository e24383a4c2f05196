"""`Interpreter` as its users meet it: statuses, sessions, time, output, and what happens to workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter import Interpreter
from sandyard.errors import HostError

OK, FAILED, TIMEOUT, UNSUPPORTED, INFRA = (
    StepStatus.OK,
    StepStatus.TASK_FAILED,
    StepStatus.TIMEOUT,
    StepStatus.UNSUPPORTED,
    StepStatus.INFRA_ERROR,
)


@pytest.fixture
async def interpreter() -> AsyncIterator[Interpreter]:
    async with Interpreter(time_limit=20) as made:
        yield made


async def test_names_are_kept_until_the_session_is_reset(interpreter: Interpreter) -> None:
    assert (await interpreter.run("import math\ndef twice(x):\n    return 2 * x\nbase = 20")).status is OK
    assert (await interpreter.run("print(twice(base) + math.floor(2.5))")).stdout == "42\n"
    await interpreter.run("base = 1\ndef twice(x):\n    return x + base")
    assert (await interpreter.run("base = 5\nprint(twice(1))")).stdout == "6\n"
    await interpreter.reset()
    assert (await interpreter.run("print(base)")).error == "NameError: name 'base' is not defined"


async def test_two_interpreters_do_not_see_each_other(interpreter: Interpreter) -> None:
    async with Interpreter() as other:
        await interpreter.run("x = 1")
        assert (await other.run("print(x)")).status is FAILED


async def test_a_failing_program_gives_the_last_line_and_what_it_printed(interpreter: Interpreter) -> None:
    result = await interpreter.run("print('before')\n[1, 2][5]\nprint('after')")
    assert (result.status, result.stdout) == (FAILED, "before\n")
    assert result.error == "IndexError: list index out of range"
    assert (await interpreter.run("def f(:")).error.startswith("SyntaxError: ")


@pytest.mark.parametrize(
    ("program", "status"),
    [("raise SystemExit", OK), ("raise SystemExit(0)", OK), ("raise SystemExit(3)", FAILED)],
)
async def test_system_exit_ends_the_step_only(interpreter: Interpreter, program: str, status: StepStatus) -> None:
    await interpreter.run("x = 1")
    assert (await interpreter.run(program)).status is status
    assert (await interpreter.run("print(x)")).stdout == "1\n"


async def test_an_endless_loop_ends_the_step_and_says_that_the_names_are_gone(interpreter: Interpreter) -> None:
    await interpreter.run("x = 1")
    result = await interpreter.run("while True:\n    pass", timeout=0.5)
    assert (result.status, result.state_lost) == (TIMEOUT, True)
    assert "0.5 s" in result.error
    after = await interpreter.run("print(x)")
    assert after.error == "NameError: name 'x' is not defined"


async def test_a_long_computation_in_c_is_stopped_too(interpreter: Interpreter) -> None:
    assert (await interpreter.run("10 ** 10 ** 10", timeout=0.5)).status is TIMEOUT


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.stdout.write('out')",
        "def f(n):\n    return f(n + 1)\nf(0)",
        "def f(n):\n    return f(n + 1)\ntry:\n    f(0)\nexcept:\n    print('caught')",
        "def f(n):\n    return f(n + 1)\ndef g():\n    try:\n        f(0)\n    finally:\n        return 1\nprint(g())",
        "try:\n    x = 'a' * (1 << 40)\nexcept Exception:\n    print('caught')",
        "print([next(iter([])) for _ in [1]])",
        "import math\nmath.pi = 3",
        "import operator\noperator.attrgetter('__class__')",
        "def f(*a):\n    return a\nf(*5)",
    ],
)
async def test_what_only_shows_while_it_runs_is_unsupported_and_nothing_catches_it(
    interpreter: Interpreter, program: str
) -> None:
    result = await interpreter.run(program)
    assert result.status is UNSUPPORTED, result
    assert result.error.startswith("unsupported: ")
    assert "run this with back end 'process' or 'sandbox'" in result.error
    assert result.refusal is not None
    assert result.refusal.line > 0
    assert (await interpreter.run("print('still here')")).stdout == "still here\n"


async def test_a_refused_program_does_not_run_in_part(interpreter: Interpreter) -> None:
    result = await interpreter.run("print('no')\nx = 1\nglobal_ = eval('1')")
    assert (result.status, result.stdout) == (UNSUPPORTED, "")
    assert (await interpreter.run("print(x)")).status is FAILED


async def test_output_has_a_bound_and_says_what_was_cut() -> None:
    async with Interpreter(output_limit=100) as interpreter:
        result = await interpreter.run("for i in range(1000):\n    print('x' * 100)")
        assert result.status is OK
        assert len(result.stdout) < 200
        assert "100900 more characters were not kept" in result.stdout
        assert (await interpreter.run("print('next')")).stdout == "next\n"


async def test_a_name_of_a_builtin_may_be_the_programs(interpreter: Interpreter) -> None:
    await interpreter.run("def sum(a, b):\n    return a * b\nmax = 3\nlist_ = list('ab')")
    assert (await interpreter.run("print(sum(3, 4), max, len(list_))")).stdout == "12 3 2\n"


async def test_calls_at_the_same_time_wait_for_each_other(interpreter: Interpreter) -> None:
    results = await asyncio.gather(*(interpreter.run(f"print({n})") for n in range(10)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(10)]


async def test_a_cancelled_call_leaves_no_answer_for_the_next(interpreter: Interpreter) -> None:
    await interpreter.run("x = 1")
    call = asyncio.create_task(interpreter.run("while True:\n    pass"))
    await asyncio.sleep(0.3)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await interpreter.run("print('mine')")).stdout == "mine\n"


async def test_a_worker_killed_from_outside_is_nobodys_fault(interpreter: Interpreter) -> None:
    await interpreter.run("x = 1")
    (worker,) = children()
    (session,) = children(worker)
    call = asyncio.create_task(interpreter.run("while True:\n    pass"))
    await asyncio.sleep(0.3)
    os.kill(worker, signal.SIGKILL)
    result = await call
    assert (result.status, result.state_lost) == (INFRA, True)
    await gone(session)
    assert (await interpreter.run("print(1)")).stdout == "1\n"


async def test_closing_leaves_no_process() -> None:
    interpreter = Interpreter()
    await interpreter.run("x = 1")
    (worker,) = children()
    sessions = children(worker)
    assert len(sessions) == 1
    await interpreter.close()
    await interpreter.close()
    assert children() == []
    await gone(sessions[0])


async def test_modules_are_new_in_every_session(interpreter: Interpreter) -> None:
    await interpreter.run("import decimal\ndecimal.getcontext().prec = 3")
    await interpreter.run("from collections import Counter\nCounter.x = 1\nprint(hasattr(Counter, 'x'))")
    await interpreter.reset()
    result = await interpreter.run(
        "from decimal import Decimal\nfrom collections import Counter\nprint(Decimal(1) / 3, hasattr(Counter, 'x'))"
    )
    assert result.stdout == "0.3333333333333333333333333333 False\n"


async def test_imports_are_a_setting() -> None:
    async with Interpreter(imports={"textwrap"}) as interpreter:
        assert (await interpreter.run("import textwrap\nprint(textwrap.dedent(' a'))")).stdout == "a\n"
        assert (await interpreter.run("import math")).status is UNSUPPORTED


async def test_the_worker_has_nothing_of_this_process_environment(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDYARD_API_KEY", "secret")
    await interpreter.run("x = 1")
    (worker,) = children()
    assert "secret" not in environment_of(worker)


async def test_a_release_that_was_not_proven_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "smolagents"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "local_python_executor.py").write_text("")
    monkeypatch.setattr("sandyard.envs.interpreter.executor.worker_environment", lambda seed: environment(tmp_path))
    with pytest.raises(HostError, match=r"not proven.*install smolagents"):
        await Interpreter().run("x = 1")
    assert children() == []


def environment(first: Path) -> dict[str, str]:
    return {
        "PATH": os.defpath,
        "PYTHONPATH": os.pathsep.join([str(first), *(p for p in sys.path if p.endswith("src"))]),
    }


def children(of: int | None = None) -> list[int]:
    parent = os.getpid() if of is None else of
    texts = [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")]
    return [int(pid) for pid in " ".join(texts).split()]


def environment_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


async def gone(pid: int) -> None:
    """Wait until the process has ended."""
    async with asyncio.timeout(10):
        while lives(pid):  # noqa: ASYNC110 - it is no child of this process: nothing tells
            await asyncio.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
