"""What interpreters of this kind are known to get silently wrong: here each is as in CPython, or refused by name."""

from __future__ import annotations

import pytest

from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter import Interpreter
from tests.envs.interpreter.oracle import run_in_cpython

TRAPS = {
    "a decorated def": "def twice(f): return lambda: 2 * f()\n@twice\ndef g(): return 2\nprint(g())",
    "mock.patch": "from unittest import mock\nimport random\n@mock.patch('random.random', return_value=.5)\n"
    "def f(m): return random.random()\nprint(f())",
    "lru_cache": "from functools import lru_cache\nn = []\n@lru_cache\ndef f(x):\n    n.append(x)\n    return x\n"
    "f(1); f(1); f(1)\nprint(len(n))",
    "property": "class A:\n    @property\n    def x(self): return 7\nprint(A().x)",
    "for-else": "r = None\nfor i in []: pass\nelse: r = 'else'\nprint(r)",
    "mutable default": "def f(a=[]):\n    a.append(len(a) + 1)\n    return a\nf()\nprint(f())",
    "default bound at definition": "x = 1\ndef f(a=x): return a\nx = 2\nprint(f())",
    "keywords beside **": "def f(a, *b, c=0, **d): return (a, b, c, d)\nprint(f(1, 2, c=1, e=3))",
    "except IndexError": "l = [1]\ntry:\n    l[5]\nexcept IndexError:\n    print('caught')",
    "errors of the interpreter itself": "try:\n    y = (lambda: (yield))()\nexcept Exception:\n    print('swallowed')",
    "augmented assignment evaluates once": "n = []\ndef i():\n    n.append(1)\n    return 0\nl = [5]\nl[i()] += 1\n"
    "print(l, len(n))",
    "a builtin shadowed": "def sum(xs): return 'mine'\nprint(sum([1, 2]))",
    "UnboundLocalError": "x = 1\ndef f():\n    y = x\n    x = 2\n    return y\nprint(f())",
    "an abstract class": "from abc import ABC, abstractmethod\nclass A(ABC):\n    @abstractmethod\n"
    "    def f(self): ...\nA()",
    "sys.stdout": "import sys\nsys.stdout.write('to the program')",
    "yield": "def f():\n    yield 1\nprint(list(f()))",
    "nonlocal": "def f():\n    x = 1\n    def g():\n        nonlocal x\n"
    "        x = 2\n    g()\n    return x\nprint(f())",
    "global": "x = 1\ndef f():\n    global x\n    x = 2\nf()\nprint(x)",
    "match": "match 1:\n    case 1: print('one')",
    "async": "import asyncio\nasync def f(): return 1\nprint(asyncio.run(f()))",
    "walrus": "print((n := 3) + n)",
    "super": "class A:\n    def f(self): return 1\nclass B(A):\n"
    "    def f(self): return super().f() + 1\nprint(B().f())",
    "starred unpack": "a, *b = [1, 2, 3]\nprint(a, b)",
    "keyword-only": "def f(*, a=1): return a\nprint(f(a=2))",
    "positional-only": "def f(a, /, b): return (a, b)\nprint(f(1, b=2))",
    "classmethod": "class A:\n    @classmethod\n    def f(cls): return cls.__name__\nprint(A.f())",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint(A())",
    "eval": "print(eval('1 + 1'))",
    "an assertion with a message": "try:\n    assert 1 == 2, 'msg'\nexcept AssertionError as e:\n    print(e)",
    "an assertion of what is truthy": "assert [0]\nassert 'x'\nprint('both')",
}


@pytest.mark.parametrize("name", TRAPS)
async def test_a_known_trap_ends_as_in_cpython_or_is_refused(name: str) -> None:
    program = TRAPS[name]
    ((printed, error),) = run_in_cpython([program])
    async with Interpreter(time_limit=20) as interpreter:
        result = await interpreter.run(program)
    if result.status is StepStatus.UNSUPPORTED:
        assert "process" in result.error  # the back end to take
        assert "line" in result.error
        return
    assert (result.stdout, result.error or "") == (printed, error)
