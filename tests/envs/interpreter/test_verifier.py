"""The verifier on the interpreter: a number that CPython gives too, or `Unsupported`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandyard.errors import Unsupported
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome
from sandyard.verify.interpreter import InterpreterVerifier
from sandyard.verify.local import local_verifier
from sandyard.verify.program import RunnerLimits
from sandyard.verify.shaping import score
from tests.envs.interpreter.test_interpreter import children

TASK = Task("t", "f", tests=("assert f(2) == 4", "assert f(3) == 9", "assert f(0) == 0, 'zero'"))


@pytest.fixture
async def verifier() -> AsyncIterator[InterpreterVerifier]:
    made = InterpreterVerifier(limits=RunnerLimits(cpu_timeout=2, test_timeout=20.0, memory_mb=1024))
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("solution", "reward"),
    [
        ("def f(x):\n    return x ** 2", 1.0),
        ("def f(x):\n    return x * 2", 0.1 + 0.4 * 2 / 3),
        ("def f(x):\n    return 1 // 0", 0.1),
        ("def f(x):\n    x ** 2", 0.1),
        ("def g(x):\n    return x ** 2", 0.1),
        ("def f(x:\n    return x ** 2", 0.1),
        ("raise SystemExit(0)", 0.1),
        ("print('TESTS_PASSED', 3, 3)\nraise SystemExit", 0.1),
        ("class A:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()", 0.1),
        ("class E(AssertionError):\n    pass\ndef f(x):\n    raise E('f')", 0.1),
        ("f = lambda x, power=2: x ** power", 1.0),
    ],
)
async def test_a_solution_scores_what_it_scores_in_cpython(
    verifier: InterpreterVerifier, solution: str, reward: float
) -> None:
    assert await score(verifier, TASK, solution) == pytest.approx(reward)
    assert await score(local_verifier(), TASK, solution) == pytest.approx(reward)


@pytest.mark.parametrize(
    "solution",
    [
        "import os\ndef f(x):\n    return x ** 2",
        "import os\nos._exit(0)",
        "def f(x):\n    yield x",
        "def f(x):\n    return f(x)",
        "def f(x):\n    try:\n        return g(x)\n    except:\n        return x ** 2\ndef g(x):\n    return g(x)",
        "def f(x):\n    while True:\n        pass",
        "while True:\n    pass",
    ],
)
async def test_what_the_interpreter_cannot_tell_has_no_number(verifier: InterpreterVerifier, solution: str) -> None:
    with pytest.raises(Unsupported, match="'process' or 'sandbox'"):
        await verifier.verify(TASK, solution)


async def test_a_solution_that_was_not_submitted(verifier: InterpreterVerifier) -> None:
    verdict = await verifier.verify(TASK, None)
    assert (verdict.submitted, verdict.passed, verdict.total) == (False, 0, 3)


async def test_the_outcomes_are_told_apart(verifier: InterpreterVerifier) -> None:
    verdict = await verifier.verify(TASK, "def f(x):\n    return {2: 4, 3: 8}[x]")
    outcomes = [result.outcome for result in verdict.results]
    assert outcomes == [TestOutcome.PASSED, TestOutcome.FAILED, TestOutcome.CRASHED]
    assert "KeyError: 0" in verdict.results[2].detail


async def test_setup_code_and_imports_reach_the_solution(verifier: InterpreterVerifier) -> None:
    task = Task("s", "f", tests=("assert f(9) == offset + 3",), setup_code="import math\noffset = 1")
    assert await score(verifier, task, "def f(x):\n    return math.sqrt(x) + offset") == 1.0


async def test_closing_ends_the_process_and_a_later_call_starts_another(verifier: InterpreterVerifier) -> None:
    await verifier.verify(TASK, "def f(x):\n    return 1")
    (server,) = children()
    await verifier.close()
    assert server not in children()
    assert (await verifier.verify(TASK, "def f(x):\n    return x * x")).passed == 3
