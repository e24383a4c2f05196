"""What the guard refuses, and in which words."""

from __future__ import annotations

import pytest

from sandyard.envs.interpreter import DEFAULT_IMPORTS, Refusal, check

REFUSED = {
    "decorator": "@str\ndef f():\n    return 1",
    "yield": "def f():\n    yield 1",
    "yield from": "def f():\n    yield from [1]",
    "nonlocal": "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
    "global": "def f():\n    global x",
    "match": "match 1:\n    case 1:\n        pass",
    "async def": "async def f():\n    pass",
    "assignment expression": "print(x := 1)",
    "for-else": "for i in []:\n    pass\nelse:\n    pass",
    "while-else": "while 0:\n    pass\nelse:\n    pass",
    "with": "with x:\n    pass",
    "except*": "try:\n    pass\nexcept* ValueError:\n    pass",
    "builtin eval": "eval('1')",
    "builtin open": "open('/etc/passwd')",
    "builtin getattr": "getattr(1, 'real')",
    "builtin super": "super()",
    "attribute __class__": "(1).__class__",
    "attribute gi_frame": "x.gi_frame",
    "name __builtins__": "__builtins__",
    "import of os": "import os",
    "import of subprocess": "from subprocess import run",
    "import of stdout from sys": "from sys import stdout",
    "import of os.path": "import os.path",
    "relative import": "from . import x",
    "double-starred argument": "f(**{})",
    "del of what is no item": "x = 1\ndel x",
    "raise without an exception": "raise",
    "print that is not called at once": "f = print",
    "a definition of print": "def print():\n    pass",
    "matrix product": "a @ b",
    "identity of values": "x is y",
    "method __next__": "class A:\n    def __next__(self):\n        return 1",
    "method __bool__": "class A:\n    def __bool__(self):\n        return True",
    "type() that makes a class": "type('A', (), {})",
    "function in a comprehension that keeps its variable": "[lambda: x for x in [1]]",
    "class in a function": "def f():\n    class A:\n        pass",
    "default that names a member of the class": "class A:\n    n = 1\n    def f(self, x=n):\n        return x",
    "starred value in a set display": "{*[1]}",
    "base class that is no class of the program, object or Exception": "class A(list):\n    pass",
}


@pytest.mark.parametrize("construct", sorted(REFUSED))
def test_what_is_refused(construct: str) -> None:
    refusal = check(REFUSED[construct])
    assert refusal is not None
    assert refusal.construct == construct


def test_a_refusal_is_one_line_that_names_construct_line_and_back_ends() -> None:
    refusal = check("x = 1\n\ndef f():\n    global x\n    x = 2\n")
    assert isinstance(refusal, Refusal)
    assert (refusal.construct, refusal.line, refusal.column) == ("global", 4, 4)
    assert str(refusal) == "unsupported: global at line 4: run this with back end 'process' or 'sandbox'"


def test_a_program_that_does_not_compile_is_not_refused() -> None:
    assert check("def f(:") is None
    assert check("return 1") is None


def test_nesting_without_end_is_refused() -> None:
    refusal = check("x = " + "-" * 50_000 + "1")
    assert refusal is None or refusal.construct == "too deep a nesting"
    assert check("f" + "(f" * 3000 + ")" * 3000) is None  # CPython's parser refuses it: a SyntaxError


def test_imports_are_a_setting() -> None:
    assert check("import math") is None
    assert check("import math", imports={"re"}) is not None
    assert check("import textwrap") is not None
    assert check("import textwrap", imports={*DEFAULT_IMPORTS, "textwrap"}) is None


def test_whole_programs_of_the_usual_kind_are_accepted() -> None:
    program = """
import re
from collections import defaultdict
from typing import List

class Stack:
    '''A stack.'''
    limit = 5
    def __init__(self, items=None):
        self.items = items or []
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self):
        return len(self.items)

def group(words: List[str], *, size=2, **options) -> dict:
    found = defaultdict(list)
    for index, word in enumerate(words):
        if not word:
            continue
        found[len(word) // size].append((index, word.upper()))
    first, *others = sorted(found.items(), key=lambda pair: -pair[0])
    def inner(n):
        return n if n < 2 else inner(n - 1) + inner(n - 2)
    try:
        return {first[0]: [*others, inner(5)]}
    except (KeyError, ValueError) as error:
        raise RuntimeError(f'bad {error!r}') from error
    finally:
        print('done', sep='', end='!')

assert len(Stack().push(1)) == 1, 'a stack'
print(group(re.findall(r'\\w+', 'a bb ccc'))) if __name__ == '__main__' else None
"""
    assert check(program) is None
