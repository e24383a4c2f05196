"""A generator of small programs, weighted over what solutions of MBPP use, with the traps in between.

`make_program(seed)` is a program that ends by printing the values of its variables. Expressions are
made by type, so that most programs run; one in some has an error on purpose, caught or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.envs.interpreter.expressions import BOOL, DICT, INT, LIST, PAIR, PAIRS, SET, STR, WORDS, Expressions

_IMPORTS = (
    "import math",
    "import re",
    "import heapq",
    "import itertools",
    "import functools",
    "import collections",
    "import bisect",
    "import string",
    "from collections import Counter, defaultdict, deque, OrderedDict",
    "from functools import reduce",
    "import math as m",
    "from itertools import combinations, groupby, chain",
    "from math import sqrt, gcd",
    "from operator import itemgetter",
)


class Maker(Expressions):
    """One program."""

    def block(self, depth: int, *, returns: int | None = None, loop: bool = False) -> list[str]:
        lines: list[str] = []
        known = len(self.names)
        for _ in range(self.random.randint(1, 3 if depth else 6)):
            self.budget -= 1
            if self.budget < 0:
                break
            lines += self.statement(depth, returns=returns, loop=loop)
        if self.chance(0.9):  # else a name of this block may be read where it has no value
            del self.names[known:]
        return lines or ["pass"]

    def statement(self, depth: int, *, returns: int | None, loop: bool) -> list[str]:
        simple = [self.assign, self.assign, self.augment, self.change, self.show]
        nested = [self.if_, self.for_, self.for_, self.while_, self.try_]
        if loop and self.chance(0.15):
            return [f"if {self.of(BOOL)}:", f"    {self.pick('break', 'continue')}"]
        if returns is not None and self.chance(0.12):
            return [f"if {self.of(BOOL)}:", f"    return {self.of(returns)}"]
        if depth < 3 and self.chance(0.35):
            return self.random.choice(nested)(depth, returns)
        lines = self.random.choice(simple)()
        return self.guarded(lines) if depth == 0 else lines

    def assign(self) -> list[str]:
        kind = self.random.randrange(10)
        value = self.of(kind)
        if self.chance(0.15):
            a, b, other = self.fresh(), self.fresh(), self.random.randrange(10)
            line = f"{a}, {b} = {value}, {self.of(other)}"
            self.names += [(a, kind), (b, other)]
            return [line]
        name = self.fresh()
        if self.chance(0.05):
            second = self.fresh()
            self.names += [(second, kind), (name, kind)]
            return [f"{name} = {second} = {value}"]
        self.names.append((name, kind))
        return [f"{name} = {value}"]

    def augment(self) -> list[str]:
        kind = self.random.choice((INT, INT, STR, LIST, SET))
        name = self.variable(kind)
        if name is None:
            return self.assign()
        if kind == INT:
            return [f"{name} {self.pick('+=', '-=', '*=', '//=', '%=', '|=', '^=')} {self.of(INT)}"]
        return [f"{name} {'|=' if kind == SET else '+='} {self.of(kind)}"]

    def change(self) -> list[str]:
        kind = self.random.choice((LIST, LIST, DICT, SET, WORDS))
        name = self.variable(kind)
        if name is None:
            return self.assign()
        i = self.of(INT)
        options = {
            LIST: [
                f"{name}.append({i})",
                f"{name}.sort()",
                f"{name}.sort(key=lambda x: -x)",
                f"{name}[0] = {i}",
                f"{name}.extend({self.of(LIST)})",
                f"{name}.insert(0, {i})",
                f"{name}.reverse()",
                f"{name}.pop()",
                f"{name}[{i}] += 1",
                f"{name}[:1] = [{i}, {i}]",
                f"{name}[0], {name}[-1] = {name}[-1], {name}[0]",
                f"del {name}[0]",
                f"heapq.heapify({name})",
                f"heapq.heappush({name}, {i})",
                f"{name}.remove({i})",
                f"{name}[{name}.pop()] += {name}.pop()",
            ],
            DICT: [
                f"{name}[{self.of(STR)}] = {i}",
                f"{name}.update({self.of(DICT)})",
                f"{name}.pop({self.of(STR)}, None)",
                f"{name}[{self.word()}] = {name}.get({self.word()}, 0) + 1",
                f"{name}.setdefault({self.of(STR)}, {i})",
                f"{name}[{self.word()}] += {i}",
                f"del {name}[{self.word()}]",
            ],
            SET: [f"{name}.add({i})", f"{name}.discard({i})", f"{name}.update({self.of(LIST)})", f"{name}.remove({i})"],
            WORDS: [f"{name}.append({self.of(STR)})", f"{name}.sort(key=len)", f"{name}.sort()"],
        }
        return [self.random.choice(options[kind])]

    def show(self) -> list[str]:
        values = ", ".join(self.of(self.random.randrange(10)) for _ in range(self.random.randint(1, 3)))
        if self.chance(0.1):
            values += self.pick(", sep='-'", ", end=''", ", sep='', end='|\\n'")
        return [f"print({values})"]

    def if_(self, depth: int, returns: int | None) -> list[str]:
        lines = [f"if {self.of(BOOL)}:", *indented(self.block(depth + 1, returns=returns))]
        if self.chance(0.3):
            test = self.of(self.random.choice((BOOL, BOOL, INT, STR, LIST)))
            lines += [f"elif {test}:", *indented(self.block(depth + 1, returns=returns))]
        if self.chance(0.5):
            lines += ["else:", *indented(self.block(depth + 1, returns=returns))]
        return lines

    def for_(self, depth: int, returns: int | None) -> list[str]:
        name = self.fresh("i")
        kind, target, source = self.random.choice(
            (
                (INT, name, f"range({self.pick('3', '4', '1, 5', '5, 0, -2', f'len({self.of(LIST)})')})"),
                (INT, name, f"list({self.of(LIST)})"),
                (STR, name, self.of(STR)),
                (STR, name, f"list({self.of(WORDS)})"),
                (STR, name, f"sorted({self.of(DICT)})"),
                (INT, f"{name}, w", f"list({self.of(PAIRS)})"),
                (INT, f"{name}, (a, b)", f"list(enumerate({self.of(PAIRS)}))"),
            )
        )
        known = len(self.names)
        self.names.append((name, kind))
        body = self.block(depth + 1, returns=returns, loop=True)
        if self.chance(0.5):
            del self.names[known:]
        lines = [f"for {target} in {source}:", *indented(body)]
        if self.chance(0.04):
            lines += ["else:", "    print('no break')"]
        return lines

    def while_(self, depth: int, returns: int | None) -> list[str]:
        name = self.fresh("n")
        body = self.block(depth + 1, returns=returns)
        return [f"{name} = {self.random.randint(1, 5)}", f"while {name} > 0:", f"    {name} -= 1", *indented(body)]

    def try_(self, depth: int, returns: int | None) -> list[str]:
        risky = self.pick(
            f"print({self.of(LIST)}[{self.of(INT)}])",
            f"print({self.of(INT)} / {self.of(INT)})",
            f"print({self.of(DICT)}[{self.word()}])",
            f"print(int({self.of(STR)}))",
            "print(undefined_name)",
            f"print({self.of(STR)} + {self.of(INT)})",
            f"raise ValueError({self.of(STR)})",
            f"assert {self.of(BOOL)}, {self.of(STR)}",
            f"assert {self.of(BOOL)}",
            f"print({self.of(LIST)}.foo)",
            f"{self.of(STR)}.nothing()",
            "print(next(iter([])))",
            f"raise KeyError({self.word()}) from ValueError(1)",
            f"a, b = {self.of(LIST)}",
            "len(5)",
        )
        caught = self.pick(
            "except Exception as e:",
            "except (ValueError, IndexError) as e:",
            "except ZeroDivisionError as e:",
            "except (KeyError, TypeError, AttributeError, NameError) as e:",
            "except LookupError as e:",
            "except AssertionError as e:",
        )
        shows = "    print(type(e), e)"
        lines = ["try:", f"    {risky}", *indented(self.block(depth + 1, returns=returns)), caught, shows]
        if self.chance(0.5):
            lines += ["except:", "    print('bare')"]
        if self.chance(0.2):
            lines += ["else:", *indented(self.block(depth + 1, returns=returns))]
        if self.chance(0.3):
            lines += ["finally:", *indented(self.block(depth + 1))]
        return lines

    # Definitions

    def function(self) -> list[str]:
        name = self.fresh("f")
        kinds = [self.random.randrange(10) for _ in range(self.random.randint(0, 3))]
        result = self.random.choice((INT, INT, LIST, STR, BOOL, DICT))
        kept, self.names = self.names, self.names[-3:]
        parameters: list[str] = []
        for index, kind in enumerate(kinds):
            self.names.append((f"p{index}", kind))
            has_default = self.chance(0.2) or (parameters and "=" in parameters[-1])
            parameters.append(f"p{index}={self.literal(kind)}" if has_default else f"p{index}")
        if self.chance(0.08):
            parameters.append("*rest")
            self.names.append(("rest", PAIR))
        body = self.block(1, returns=result)
        if self.chance(0.9):
            body.append(f"return {self.of(result)}")
        lines = [f"def {name}({', '.join(parameters)}):"]
        if self.chance(0.1):
            lines.append("    '''What it does.'''")
        self.names = kept
        self.functions.append((name, kinds, result))
        return [*lines, *indented(body)]

    def guarded(self, lines: list[str]) -> list[str]:
        """Mostly within a `try`, so that the program goes on."""
        if self.chance(0.3):
            return lines
        return ["try:", *indented(lines), "except Exception as failure:", "    print(type(failure), failure)"]

    def special(self) -> list[str]:
        """What small programs also have, and what interpreters get wrong."""
        i, w = self.of(INT), self.of(LIST)
        return self.random.choice(SPECIALS)(i, w)

    def program(self) -> str:
        self.budget = self.random.randint(5, 25)
        lines = list(_IMPORTS)
        if self.chance(0.05):
            del lines[self.random.randrange(len(lines))]
        for _ in range(self.random.randint(0, 3)):
            lines += self.function()
        for _ in range(self.random.choice((0, 0, 0, 1, 1, 2))):
            lines += self.guarded(self.special())
        for function in self.functions:
            lines += self.guarded([f"print({self.call_of(function, 0)})"])
        lines += self.block(0)
        known = [name for name, _ in dict(self.names).items()]
        for name in known:
            lines.append(f"print({name!r}, {name})")
        return "\n".join(lines) + "\n"


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def make_program(seed: int) -> str:
    return Maker(seed).program()


def _lines(text: str) -> Callable[[str, str], list[str]]:
    """A special: `@I` and `@L` stand for an expression of an int and of a list."""
    return lambda i, w: text.strip("\n").replace("@I", i).replace("@L", w).split("\n")


SPECIALS: Sequence[Callable[[str, str], list[str]]] = []


def add_specials(text: str) -> None:
    """Pieces of programs, one blank line between them."""
    assert isinstance(SPECIALS, list)
    SPECIALS.extend(_lines(piece) for piece in text.strip("\n").split("\n\n"))
