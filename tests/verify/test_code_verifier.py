"""What a verdict says of honest solutions, in all the ways in which tests are written."""
# ruff: noqa: E501 - programs as one-line strings

from __future__ import annotations

import asyncio

import pytest

from sandyard.envs.base import Execution
from sandyard.errors import CapacityError, DeathReason, SandboxDied, SandyardError, TaskError, VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, Verdict
from sandyard.verify.code import CodeVerifier, RunnerLauncher
from sandyard.verify.local import LocalLauncher, local_verifier
from sandyard.verify.program import RunnerLimits

LIMITS = RunnerLimits(test_timeout=2.0)


def make_task(*tests: str, setup: str = "", reference: str | None = None) -> Task:
    return Task("t", "a task", tests=tests, setup_code=setup, reference=reference)


async def judge(code: str, *tests: str, setup: str = "", reference: str | None = None) -> Verdict:
    return await local_verifier(LIMITS).verify(make_task(*tests, setup=setup, reference=reference), code)


HONEST = [
    (
        "scalars",
        "def f(x): return x",
        ["assert f(1) == 1", "assert f('é\\ud800') == 'é\\ud800'", "assert f(None) is None"],
    ),
    ("big numbers", "def f(x): return x ** 9999", ["assert f(7) == 7 ** 9999", "assert f(-7) == (-7) ** 9999"]),
    (
        "floats",
        "def f(): return [float('inf'), -0.0, 0.1]",
        ["assert f() == [float('inf'), 0.0, 0.1]", "import math\nassert math.copysign(1, f()[1]) == -1"],
    ),
    ("nan", "def f(): return float('nan')", ["x = f()\nassert x != x"]),
    (
        "bytes",
        "def f(b): return b[::-1], bytearray(b)",
        ["assert f(b'\\0\\xff') == (b'\\xff\\0', bytearray(b'\\0\\xff'))"],
    ),
    (
        "sets",
        "def f(x): return set(x), frozenset(x)",
        ["a, b = f([1, 2, 1])\nassert a == {1, 2} == b and isinstance(b, frozenset)"],
    ),
    ("nested", "def f(): return {(1, 2): [{'a': (3,)}]}", ["assert f() == {(1, 2): [{'a': (3,)}]}"]),
    (
        "collections",
        "from collections import *\ndef f(s): return Counter(s), OrderedDict(a=1), deque(s, 2), defaultdict(int, b=2)",
        [
            "c, o, d, e = f('aab')\nassert c == {'a': 2, 'b': 1} and c.most_common(1) == [('a', 2)]\nassert list(d) == ['a', 'b'] and e == {'b': 2} and o == {'a': 1}"
        ],
    ),
    (
        "named tuples",
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        ["assert f() == (1, 2) and f().y == 2"],
    ),
    (
        "numbers",
        "from fractions import Fraction\nfrom decimal import Decimal\ndef f(): return Fraction(1, 3), Decimal('0.1'), 1 + 2j",
        [
            "from fractions import Fraction as F\nfrom decimal import Decimal as D\nassert f() == (F(1, 3), D('0.1'), 1 + 2j)"
        ],
    ),
    (
        "dates",
        "import datetime\ndef f(): return datetime.date(2024, 2, 29), datetime.timedelta(days=1)",
        ["import datetime as d\nassert f() == (d.date(2024, 2, 29), d.timedelta(1))"],
    ),
    (
        "views and ranges",
        "def f(d): return d.keys(), range(0, 10, 2)",
        ["k, r = f({'a': 1})\nassert k == {'a'} and r == range(0, 10, 2)"],
    ),
    (
        "generators",
        "def f(n):\n    for i in range(n):\n        yield i",
        ["assert list(f(3)) == [0, 1, 2]", "assert next(f(1)) == 0", "assert sum(f(4)) == 6"],
    ),
    (
        "iterators",
        "def f(x): return map(str, x)",
        ["assert list(f([1, 2])) == ['1', '2']", "assert ''.join(f([1])) == '1'"],
    ),
    (
        "change in place",
        "def f(x): x.sort()\ndef g(d): d['k'] = [1]\ndef h(x): x[0].append(3)",
        [
            "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]",
            "d = {}\ng(d)\nassert d == {'k': [1]}",
            "x = [[1]]\ny = x[0]\nh(x)\nassert y == [1, 3]",
        ],
    ),
    (
        "identity",
        "def f(x): return x\ndef g(x): return [x, x]",
        ["x = [1]\nassert f(x) is x", "a, b = g([1])\nassert a is b"],
    ),
    ("cycles", "def f():\n    x = [1]\n    x.append(x)\n    return x", ["x = f()\nassert x[1] is x and x[0] == 1"]),
    (
        "exceptions",
        "def f(x): raise ValueError('no ' + x)",
        ["try:\n    f('a')\nexcept ValueError as e:\n    assert str(e) == 'no a'\nelse:\n    assert False"],
    ),
    (
        "own exceptions",
        "class Bad(KeyError): pass\ndef f(): raise Bad('k')",
        [
            "try:\n    f()\nexcept Bad:\n    pass\nelse:\n    assert False",
            "try:\n    f()\nexcept KeyError as e:\n    assert e.args == ('k',)",
        ],
    ),
    (
        "functions of the test",
        "def f(g, x): return [g(i) for i in x]",
        ["assert f(lambda i: i * 2, [1, 2]) == [2, 4]", "assert f(len, ['ab']) == [2]"],
    ),
    (
        "iterators of the test",
        "def f(x): return sum(x)",
        ["assert f(i for i in range(4)) == 6", "assert f(iter([1, 2])) == 3"],
    ),
    ("functions of the solution", "def f(n):\n    def g(x): return x + n\n    return g", ["assert f(2)(3) == 5"]),
    (
        "classes",
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __add__(self, o): return P(self.x + o.x)\n    def __len__(self): return self.x\n    def __repr__(self): return f'P({self.x})'",
        [
            "assert P(1) == P(1)",
            "assert (P(1) + P(2)).x == 3",
            "assert len(P(4)) == 4 and repr(P(1)) == 'P(1)'",
            "assert isinstance(P(1), P)",
            "p = P(1)\np.x = 5\nassert p.x == 5",
        ],
    ),
    ("type of a result", "def f(): return int\ndef g(): return [1]", ["assert f() is int", "assert type(g()) is list"]),
    ("keywords", "def f(a, *b, c=1, **d): return a, b, c, d", ["assert f(1, 2, c=3, e=4) == (1, (2,), 3, {'e': 4})"]),
    (
        "state within a test",
        "n = []\ndef f():\n    n.append(1)\n    return len(n)",
        ["assert [f(), f(), f()] == [1, 2, 3]", "assert f() == 1"],
    ),
    ("enums of int", "import enum\nclass E(enum.IntEnum):\n    A = 1\ndef f(): return E.A", ["assert f() == 1"]),
    (
        "dataclasses",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef f(): return P(3)",
        ["assert f().x == 3", "assert f() == P(3)"],
    ),
    ("recursion to the usual depth", "def f(n): return 0 if n == 0 else 1 + f(n - 1)", ["assert f(980) == 980"]),
    ("main guard", "def f(): return answer\nif __name__ == '__main__':\n    answer = 42", ["assert f() == 42"]),
    ("stdin is empty", "import sys\ndef f(): return sys.stdin.read()", ["assert f() == ''"]),
    ("much output", "def f():\n    print('x' * 10_000_000)\n    return 1", ["assert f() == 1"]),
    ("sys of the solution", "import sys\ndef f(x): return sys.getsizeof(x)", ["assert f(()) == sys.getsizeof(())"]),
]


@pytest.mark.parametrize(("code", "tests"), [case[1:] for case in HONEST], ids=[case[0] for case in HONEST])
async def test_honest_solutions_pass(code: str, tests: list[str]) -> None:
    verdict = await judge(code, *tests)
    assert verdict.passed == verdict.total == len(tests), verdict.results


async def test_a_function_named_like_a_builtin() -> None:
    test = "assert sum(2, 3) == 6 and len([1]) == 1"
    code = "def sum(a, b): return a * b\ndef len(x): return 7"
    assert (await judge(code, test, reference="def sum(a, b): return a * b")).passed == 1


async def test_helper_classes_of_the_setup_cross_by_value() -> None:
    setup = "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n    def total(self): return self.v + (self.n.total() if self.n else 0)"
    code = "def push(node, v): return Node(v, node)\ndef bump(node): node.v += 1"
    tests = (
        "assert push(Node(1), 2).total() == 3",
        "n = Node(1)\nbump(n)\nassert n.v == 2",
        "n = Node(1)\nassert push(n, 0).n is n",
    )
    assert (await judge(code, *tests, setup=setup)).passed == 3
    lying = "class Node:\n    def __init__(self, *a): self.total = lambda: 3\ndef push(node, v): return Node()"
    assert (await judge(lying, tests[0], setup=setup)).passed == 0


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("def f(x): return 0", TestOutcome.FAILED, "AssertionError: wrong"),
        ("def f(x): return x / 0", TestOutcome.CRASHED, "ZeroDivisionError: division by zero"),
        ("def g(x): return 1", TestOutcome.CRASHED, "NameError: name 'f' is not defined"),
        ("def f(x:", TestOutcome.CRASHED, "SyntaxError"),
        ("import nothing_like_it", TestOutcome.CRASHED, "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def f(x): assert False, 'mine'", TestOutcome.CRASHED, "the solution raised AssertionError: mine"),
        ("def f(x):\n    while True: pass", TestOutcome.TIMEOUT, "longer than"),
        ("import time\ntime.sleep(60)", TestOutcome.TIMEOUT, "longer than"),
        ("import os\ndef f(x): os._exit(3)", TestOutcome.CRASHED, "the solution's process ended: exit code 3"),
        ("import os\ndef f(x): os.kill(os.getpid(), 9)", TestOutcome.CRASHED, "the solution's process ended: signal 9"),
        ("class C: pass\ndef f(x): return C()", TestOutcome.FAILED, "(a C was compared with plain data)"),
        ("def f(x): return [0] * (1 << 32)", TestOutcome.CRASHED, "MemoryError"),
    ],
)
async def test_how_a_wrong_solution_failed(code: str, outcome: TestOutcome, detail: str) -> None:
    verdict = await local_verifier(RunnerLimits(test_timeout=1.5, cpu_timeout=1)).verify(
        make_task("assert f(1) == 1, 'wrong'"), code
    )
    assert verdict.results[0].outcome is outcome
    assert detail in verdict.results[0].detail


async def test_an_error_in_one_test_does_not_stop_the_next() -> None:
    verdict = await judge("def f(x): return 1 / x", "assert f(0) == 1", "assert f(2) == 0", "assert f(1) == 1")
    assert [r.outcome for r in verdict.results] == [TestOutcome.CRASHED, TestOutcome.FAILED, TestOutcome.PASSED]
    assert (verdict.passed, verdict.total) == (1, 3)


async def test_state_does_not_pass_from_test_to_test() -> None:
    code = "import os\ndef f():\n    os.environ['X'] = os.environ.get('X', '') + 'x'\n    return os.environ['X']"
    assert (await judge(code, "assert f() == 'x'", "assert f() == 'x'")).passed == 2


async def test_the_total_time_is_bounded() -> None:
    limits = RunnerLimits(test_timeout=0.4, total_timeout=0.6)
    verdict = await local_verifier(limits).verify(make_task(*["assert f()"] * 5), "def f():\n    while True: pass")
    assert [r.outcome for r in verdict.results] == [TestOutcome.TIMEOUT] * 5
    assert verdict.results[4].detail == "no time was left for it"


async def test_never_submitted_runs_nothing() -> None:
    verdict = await CodeVerifier(FailingLauncher()).verify(make_task("assert True"), None)
    assert verdict == Verdict(submitted=False, passed=0, total=1)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (make_task(), "has no tests"),
        (make_task("assert f("), "test 0 does not parse"),
        (make_task("assert f()", setup="root = Node(1)"), "setup code fails: NameError: name 'Node' is not defined"),
        (make_task("assert f(object())"), "the test hands over a object"),
    ],
)
async def test_a_broken_task_is_the_tasks_fault(task: Task, text: str) -> None:
    with pytest.raises(TaskError, match=text.replace("(", r"\(")):
        await local_verifier(LIMITS).verify(task, "def f(*x): return 1")


class FailingLauncher(RunnerLauncher):
    """Fails with each of `errors` in turn, then runs for real."""

    require_root = False
    uid_base = 0

    def __init__(self, *errors: SandyardError | Execution) -> None:
        self.errors = list(errors)
        self.launches = 0

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        self.launches += 1
        if self.errors:
            error = self.errors.pop(0)
            if isinstance(error, Execution):
                return error
            raise error
        return await LocalLauncher().launch(stdin, timeout)


DIED = SandboxDied("sbx", DeathReason.OOM)


@pytest.mark.parametrize(
    "trouble", [DIED, VerifierError("no"), Execution("", "boom", 1), Execution("TESTS_PASSED 1 1", "", 0)]
)
async def test_trouble_is_tried_again_once_then_raised(trouble: SandyardError | Execution) -> None:
    task, code = make_task("assert f() == 1"), "def f(): return 1"
    launcher = FailingLauncher(trouble)
    assert (await CodeVerifier(launcher).verify(task, code)).passed == 1
    assert launcher.launches == 2
    with pytest.raises((SandboxDied, VerifierError)):
        await CodeVerifier(FailingLauncher(trouble, trouble)).verify(task, code)


async def test_room_is_waited_for_within_patience() -> None:
    task, full = make_task("assert f() == 1"), CapacityError("full", retry_after=0.01)
    assert (await CodeVerifier(FailingLauncher(full, full, full)).verify(task, "def f(): return 1")).passed == 1
    with pytest.raises(CapacityError):
        await CodeVerifier(FailingLauncher(full, full), patience=0.0).verify(task, "def f(): return 1")


async def test_a_cancelled_verification_leaves_no_runner() -> None:
    task = make_task("assert f() == 1")
    work = asyncio.ensure_future(
        CodeVerifier(LocalLauncher(), limits=RunnerLimits(20, 20)).verify(task, "import time\ntime.sleep(50)")
    )
    await asyncio.sleep(0.4)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
