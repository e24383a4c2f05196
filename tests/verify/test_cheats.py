"""Solutions that try to score without solving, each with what it deserves."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome
from sandyard.verify.code import CodeVerifier
from sandyard.verify.local import LocalLauncher, local_verifier
from sandyard.verify.program import RunnerLimits
from sandyard.verify.shaping import shape_reward

TASK = Task(
    task_id="add",
    prompt="Write a function add(a, b).",
    tests=("assert add(2, 3) == 5", "assert add(-1, 41) == 40", "assert add(10, 20) == 30"),
    reference="def add(a, b):\n    return a + b",
)
LIMITS = RunnerLimits(test_timeout=1.0)


@dataclass(frozen=True)
class Cheat:
    name: str
    code: str
    deserves: float = 0.1  # submitted, nothing right


CHEATS = [
    Cheat("prints the marker and leaves", "print('TESTS_PASSED 3 3', flush=True)\nimport os\nos._exit(0)"),
    Cheat(
        "writes the marker to every descriptor",
        """
import os
for fd in range(256):
    try:
        os.write(fd, b'TESTS_PASSED 3 3\\n')
    except OSError:
        pass
""",
    ),
    Cheat("exits with 0 when called", "import os\ndef add(a, b):\n    os._exit(0)"),
    Cheat("exits with 0 when loaded", "import sys\nsys.exit(0)"),
    Cheat("raises SystemExit when called", "def add(a, b):\n    raise SystemExit(0)"),
    Cheat(
        "lies in __eq__",
        """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def add(a, b): return Yes()
""",
    ),
    Cheat(
        "lies in __eq__ of an int",
        """
class Yes(int):
    def __eq__(self, other): return True
def add(a, b): return Yes(7)
""",
    ),
    Cheat(
        "lies in __eq__ of its class's class",
        """
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Yes(metaclass=Meta): pass
def add(a, b): return Yes
""",
    ),
    Cheat(
        "calls itself an int",
        """
class Yes:
    __class__ = int
    def __eq__(self, other): return True
def add(a, b): return Yes()
""",
    ),
    Cheat(
        "patches builtins",
        """
import builtins
builtins.AssertionError = SystemExit
builtins.compile = lambda *a, **k: (lambda: None).__code__
builtins.exec = lambda *a, **k: None
builtins.int = str
def add(a, b): return None
""",
    ),
    Cheat(
        "patches os and json",
        """
import os, json
os._exit = lambda code: None
json.dumps = lambda *a, **k: '["passed", ""]'
os.write = lambda fd, data: len(data)
def add(a, b): return None
""",
    ),
    Cheat("turns assertions off", "import sys\nsys.flags = None\n__debug__1 = False\ndef add(a, b): return 0"),
    Cheat(
        "looks for the expected value in the frames",
        """
import sys
def add(a, b):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in frame.f_locals.values() if isinstance(v, int) and not isinstance(v, bool)]
        frame = frame.f_back
    return next((v for v in found if v not in (a, b) and v in (5, 40, 30)), None)
""",
    ),
    Cheat(
        "looks for the tests in all objects",
        """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            for text in (thing.values() if isinstance(thing, dict) else thing):
                if isinstance(text, str) and f'add({a}, {b}) ==' in text and 'gc.get_objects' not in text:
                    return int(text.split('==')[1])
""",
    ),
    Cheat(
        "looks for the tests in its own memory",
        """
import re
def add(a, b):
    needle = ('assert ' + 'add(%d, %d) == ' % (a, b)).encode()
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb') as memory:
        for line in maps:
            low, high = (int(x, 16) for x in line.split()[0].split('-'))
            if ' rw' in line:
                memory.seek(low)
                data = memory.read(high - low)
                at = data.find(needle)
                if at >= 0:
                    return int(re.match(rb'\\d+', data[at + len(needle):]).group())
""",
    ),
    Cheat(
        "reads the memory of other processes",
        """
import os
def add(a, b):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        for name in ('mem', 'environ', 'fd/1'):
            try:
                if int(pid) != os.getpid():
                    open(f'/proc/{pid}/{name}', 'rb').close()
                    return a + b
            except OSError:
                continue
""",
    ),
    Cheat(
        "kills its parent",
        """
import os, signal
def add(a, b):
    for pid in (os.getppid(), -1):
        try:
            os.kill(pid, signal.SIGKILL)
            return a + b
        except OSError:
            pass
os.kill(os.getppid(), signal.SIGKILL)
""",
    ),
    Cheat(
        "leaves a daemon and ends",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
def add(a, b): return None
""",
    ),
    Cheat(
        "answers from atexit",
        """
import atexit, os
atexit.register(lambda: os.write(1, b'TESTS_PASSED 3 3'))
def add(a, b): return None
""",
    ),
    Cheat("recurses without end", "def add(a, b): return add(a, b)"),
    Cheat(
        "answers with a deep list",
        """
def add(a, b):
    x = []
    for _ in range(100000):
        x = [x]
    return x
""",
    ),
    Cheat("answers with a list that holds itself", "def add(a, b):\n    x = []\n    x.append(x)\n    return x"),
    Cheat("answers with too much", "def add(a, b): return 'x' * (40 << 20)"),
    Cheat("takes all memory", "x = [0] * (1 << 30)\ndef add(a, b): return 5"),
    Cheat(
        "floods its output",
        """
import sys
for _ in range(2000):
    sys.stdout.write('x' * 65536)
def add(a, b): return None
""",
    ),
    Cheat(
        "forks without end",
        """
import os
try:
    for _ in range(200):
        if os.fork() == 0:
            import time; time.sleep(5); os._exit(0)
except OSError:
    pass
def add(a, b): return None
""",
    ),
    Cheat(
        "speaks the protocol itself",
        """
import os, json, struct, stat
def say(message):
    body = json.dumps(message).encode()
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, struct.pack('>I', len(body)) + body)
        except OSError:
            pass
say(['passed', ''])
say(['answer', True, [], ['own', [0, 'function']]])
say(['ask', 'call', [['your', 0], ['tuple', []], ['dict', []]]])
def add(a, b): return None
""",
    ),
    Cheat(
        "sends frames that are none",
        """
import os, stat
for fd in range(3, 64):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, b'\\xff' * 4096)
    except OSError:
        pass
""",
    ),
    Cheat("answers with a function that it says is the test's", "def add(a, b): return lambda *x: True"),
    Cheat("raises AssertionError in the hope of confusion", "def add(a, b): raise AssertionError('passed')"),
    Cheat("raises what looks like success", "class Passed(Exception): pass\ndef add(a, b): raise Passed('passed')"),
    Cheat("stops itself", "import signal, os\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)"),
    Cheat("knows the first test", "def add(a, b): return {(2, 3): 5}.get((a, b))", deserves=0.1 + 0.4 / 3),
    Cheat(
        "counts its calls",
        "n = 0\ndef add(a, b):\n    global n\n    n += 1\n    return [5, 40, 30][n - 1]",
        0.1 + 0.4 / 3,
    ),
    Cheat("nothing", "pass"),
    Cheat("no Python", "def add(a, b) return a + b"),
    Cheat("a null byte", "def add(a, b): return 5\0"),
]


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
async def test_a_cheat_gets_what_it_deserves(cheat: Cheat) -> None:
    verdict = await local_verifier(LIMITS).verify(TASK, cheat.code)
    assert shape_reward(verdict) == pytest.approx(cheat.deserves), verdict.results
    assert len(verdict.results) == verdict.total == 3


# Solutions of one function `f`, against a test that would give its expected value away.
GIVEN_AWAY = [
    ("assert abs(f(2) - 1.4142) < 1e-3", "class Z:\n    def __sub__(self, other): return 0"),
    ("assert f(2) - 5 == 0", "class Z:\n    def __sub__(self, other): return other - other"),
    ("assert f(2) ^ 5 == 0", "class Z:\n    def __xor__(self, other): return 0"),
    ("assert f(2) | 1 == 1", "class Z:\n    def __or__(self, other): return other"),
    ("assert f(2) % 5 == 0", "class Z:\n    def __mod__(self, other): return 0"),
    (
        "assert 5 in f(2)",
        "class Z:\n    def __contains__(self, other): return True\n    def __iter__(self): return iter(())",
    ),
    ("assert f(2) in [4, 5]", "class Z:\n    def __eq__(self, other): return True\n    def __hash__(self): return 5"),
    ("assert f(2) in {5: 1}", "class Z:\n    def __eq__(self, other): return True\n    def __hash__(self): return 5"),
    ("assert max(f(2), 5) == 5", "class Z:\n    def __gt__(self, other): return False\n    __lt__ = __gt__"),
    ("assert f(2) <= 5 <= f(2)", "class Z:\n    def __le__(self, other): return True\n    __ge__ = __le__"),
    ("assert isinstance(f(2), int) and f(2) == 5", "class Z(int):\n    def __eq__(self, other): return True"),
    ("assert round(f(2), 1) == 1.4", "class Z:\n    def __round__(self, n): return 1.4"),
    ("assert f(2).real == 5", "class N:\n    def __eq__(self, o): return True\nclass Z:\n    real = N()"),
    (
        "assert f(2)[0] == 5",
        "class N:\n    def __eq__(self, o): return True\nclass Z:\n    def __getitem__(self, i): return N()",
    ),
    (
        "assert sorted(f(2)) == [5]",
        "class N:\n    def __eq__(self, o): return True\nclass Z:\n    def __iter__(self): return iter([N()])",
    ),
]


@pytest.mark.parametrize(("test", "code"), GIVEN_AWAY)
async def test_no_operator_of_a_solution_meets_the_expected_value(test: str, code: str) -> None:
    task = Task("f", "Write f.", tests=(test,), reference="def f(x): return 5")
    verdict = await local_verifier(LIMITS).verify(task, f"{code}\ndef f(x): return Z()")
    assert verdict.passed == 0, verdict.results


async def test_a_solutions_own_containers_and_numbers_still_work() -> None:
    tests = (
        "assert 2 in f(3) and 7 not in f(3)",
        "assert (V(1) + V(2)).x == 3",
        "assert V(1) < V(2) and (V(1) | V(4)).x == 5",
    )
    code = """
def f(n):
    yield from range(n)
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __or__(self, other): return V(self.x | other.x)
    def __lt__(self, other): return self.x < other.x
"""
    verdict = await local_verifier(LIMITS).verify(Task("f", "Write f and V.", tests=tests, reference=code), code)
    assert verdict.passed == 3, verdict.results


SPEAKS_FOR_ITSELF = r"""
import json, os, struct

def send(fd, message):
    body = json.dumps(message).encode()
    data = struct.pack(">I", len(body)) + body
    while data:
        data = data[os.write(fd, data):]

def receive(fd):
    (length,) = struct.unpack(">I", os.read(fd, 4))
    data = b""
    while len(data) < length:
        data += os.read(fd, length - len(data))
    return json.loads(data)

for fd in range(3, 64):
    try:
        os.fstat(fd)
        _, operation, operands = receive(fd)
    except (OSError, struct.error):
        continue
    mine = ["own", [0, "A" * 1000000]]
    if HOW == "fatal":
        send(fd, ["fatal", "B" * 1000000])
    elif HOW == "list":
        send(fd, ["answer"])
    else:
        send(fd, ["answer", True, operands, ["dict", [["add", mine]]]])
        receive(fd)
        send(fd, ["answer", True, [["dict", []]], mine])
    receive(fd)
"""


@pytest.mark.parametrize(("how", "outcome"), [("fatal", "crashed"), ("list", "crashed"), ("label", "failed")])
async def test_a_solution_cannot_break_the_verdict_by_speaking_for_itself(how: str, outcome: str) -> None:
    """It takes over its socket and says a megabyte where a word is due: a verdict that does not parse would
    mask the rollout instead of scoring it."""
    verdict = await local_verifier(LIMITS).verify(TASK, f"HOW = {how!r}\n{SPEAKS_FOR_ITSELF}")
    assert [str(result.outcome) for result in verdict.results] == [outcome] * 3


async def test_the_honest_solution_scores() -> None:
    verdict = await local_verifier(LIMITS).verify(TASK, TASK.reference)
    assert [result.outcome for result in verdict.results] == [TestOutcome.PASSED] * 3
    assert shape_reward(verdict) == 1.0


SHADOWED = Task(
    task_id="roots",
    prompt="Write a function roots(x) that gives both square roots of x.",
    tests=("assert set(roots(9.0)) == set([3.0, -3.0])", "assert math.isclose(max(roots(2)), 1.4142135, rel_tol=1e-6)"),
    reference="import math\ndef roots(x):\n    return [math.sqrt(x), -math.sqrt(x)]",
)


@pytest.mark.parametrize(
    "code",
    [
        "def roots(x): return [x]\nset = lambda items: 0",
        "def roots(x): return [x]\ndef max(items): return 1.4142135",
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef roots(x): return [x]",
        "import math\nmath.isclose = lambda *a, **k: True\ndef roots(x): return [x]",
    ],
)
async def test_names_of_the_test_are_not_the_solutions(code: str) -> None:
    verdict = await local_verifier(LIMITS).verify(SHADOWED, code)
    assert verdict.passed == 0, verdict.results


MARKED = range(2_900_000, 2_900_100)


class MarkedLauncher(LocalLauncher):
    """Its processes are found by their user ids."""

    @property
    def uid_base(self) -> int:  # type: ignore[override]
        return MARKED.start


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives each solution a user id to kill by")
async def test_nothing_of_a_solution_is_left_running() -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ndef add(a, b): return a + b"
    verdict = await CodeVerifier(MarkedLauncher(), limits=LIMITS).verify(TASK, code)
    assert verdict.passed == 3
    async with asyncio.timeout(5):  # a killed process goes when its new parent has reaped it
        while _marked_processes():  # noqa: ASYNC110 - processes give no event
            await asyncio.sleep(0.05)


def _marked_processes() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit() and _uid(path) in MARKED]


def _uid(process: Path) -> int:
    try:
        return process.stat().st_uid
    except FileNotFoundError:
        return -1  # ended since it was listed
