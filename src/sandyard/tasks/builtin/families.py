"""The families of built-in tasks: what each asks for, its right solution and its near misses.

A family is an operation with one whole-number parameter `k`. Its near misses are the *same signature
with another operation*: a policy that knows names and numbers but not what the words mean writes
them, and the hidden tests tell them from the right one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PARAMETERS = range(2, 32)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Family:
    """One operation.

    `phrases` complete "Write a function NAME that ..."; `right` and `wrong` are expressions over
    `argument` (both with `{k}`); `inputs(k, rng)` gives arguments that tell them apart; `probe` is
    what a careful programmer would print to try the function `{f}` out.
    """

    name: str
    argument: str
    phrases: Sequence[str]
    right: str
    wrong: Sequence[str]
    inputs: Callable[[int, random.Random], list[object]]
    probe: str

    def prompt(self, function: str, k: int, phrase: int) -> str:
        return f"Write a function {function} that {self.phrases[phrase % len(self.phrases)].format(k=k)}."

    def solution(self, function: str, k: int, expression: str | None = None) -> str:
        """The program that returns `expression` (default: the right one)."""
        body = (expression or self.right).format(k=k)
        return f"def {function}({self.argument}):\n    return {body}"

    def trial(self, function: str) -> str:
        """The line that tries the function out."""
        return f"print({self.probe.format(f=function)})"


def _numbers(k: int, rng: random.Random) -> list[object]:
    return [k * rng.randint(3, 6) + rng.randint(1, k - 1), rng.randint(2, 9) + k, -rng.randint(1, k + 5), 1]


def _around(k: int, rng: random.Random) -> list[object]:
    return [k + rng.randint(2, 20), k - rng.randint(2, 20), k + 1, k - 1, -k]


def _lists(k: int, rng: random.Random) -> list[object]:
    near = [k - 1, k, k + 1, k + 1]
    return [rng.sample(range(-40, 60), 7) + near, [*near, k + 5], [k, k, k - 3], [k + 2]]


def _multiples(k: int, rng: random.Random) -> list[object]:
    mixed = [k * rng.randint(1, 5), k + 1, k * 2, 2 * k + 1, rng.randint(1, k - 1)]
    return [mixed, [1, k, k * k, k * k + 1], [k + 1, k - 1, 0], [0, k, k]]


def _long_lists(k: int, rng: random.Random) -> list[object]:
    return [rng.sample(range(100, 200), k + extra) for extra in (3, 5, 8, 2)]


def _strings(k: int, rng: random.Random) -> list[object]:
    return ["".join(rng.choice(LETTERS) for _ in range(k + extra)) for extra in (3, 4, 6, 2 * k)]


def _words(k: int, rng: random.Random) -> list[object]:
    return ["".join(rng.choice(LETTERS) for _ in range(length)) for length in (1, 3, 2, 4)]


FAMILIES: tuple[Family, ...] = (
    Family(
        "add", "n", ("adds {k} to a number", "increases a number by {k}"),
        "n + {k}", ("n - {k}", "n * {k}", "{k} - n", "n // {k}"), _numbers, "{f}(5)",
    ),
    Family(
        "subtract", "n", ("subtracts {k} from a number", "decreases a number by {k}"),
        "n - {k}", ("n + {k}", "{k} - n", "n // {k}", "n * {k}"), _numbers, "{f}(5)",
    ),
    Family(
        "multiply", "n", ("multiplies a number by {k}", "returns {k} times a number"),
        "n * {k}", ("n + {k}", "n - {k}", "n // {k}", "{k} - n"), _numbers, "{f}(2)",
    ),
    Family(
        "remainder", "n", ("returns the remainder after dividing by {k}", "takes a number modulo {k}"),
        "n % {k}", ("n // {k}", "n - {k}", "n * {k}", "n + {k}"), _numbers, "{f}(50)",
    ),
    Family(
        "at_most", "n", ("caps a number at {k}", "limits a number to at most {k}"),
        "min(n, {k})", ("max(n, {k})", "n - {k}", "n % {k}", "n + {k}"), _around, "{f}(9)",
    ),
    Family(
        "at_least", "n", ("raises a number to at least {k}", "keeps a number from falling below {k}"),
        "max(n, {k})", ("min(n, {k})", "n + {k}", "n * {k}", "n - {k}"), _around, "{f}(9)",
    ),
    Family(
        "count_greater", "xs", ("counts the numbers greater than {k}", "counts the items above {k}"),
        "len([x for x in xs if x > {k}])",
        (
            "len([x for x in xs if x < {k}])", "len([x for x in xs if x >= {k}])",
            "len([x for x in xs if x == {k}])", "[x for x in xs if x > {k}]",
        ),
        _lists, "{f}([1, 9, 40])",
    ),
    Family(
        "divisible", "xs", ("keeps the numbers divisible by {k}", "filters the multiples of {k} from a list"),
        "[x for x in xs if x % {k} == 0]",
        (
            "[x for x in xs if x % {k} != 0]", "[x for x in xs if x > {k}]",
            "[x for x in xs if x % {k} == 1]", "[x for x in xs if x < {k}]",
        ),
        _multiples, "{f}([6, 7, 40])",
    ),
    Family(
        "element", "xs", ("returns the element at index {k} of a list", "picks item {k} of a list counting from 0"),
        "xs[{k}]", ("xs[-{k}]", "xs[{k} - 1]", "xs[{k} + 1]", "xs[-{k} - 1]"), _long_lists, "{f}(list(range(50)))",
    ),
    Family(
        "prefix", "s", ("returns the first {k} characters", "returns the prefix of length {k}"),
        "s[:{k}]", ("s[{k}:]", "s[-{k}:]", "s[:-{k}]", "s[{k}]"), _strings, "len({f}('ab' * 40))",
    ),
    Family(
        "suffix", "s", ("returns the last {k} characters", "returns the suffix of length {k}"),
        "s[-{k}:]", ("s[:{k}]", "s[:-{k}]", "s[{k}:]", "s[-{k}]"), _strings, "len({f}('ab' * 40))",
    ),
    Family(
        "repeat", "s", ("repeats a string {k} times", "joins {k} copies of a string"),
        "s * {k}", ("s + '{k}'", "s[:{k}]", "[s] * {k}", "s[-{k}:]"), _words, "len({f}('ab'))",
    ),
)  # fmt: skip

BY_NAME = {family.name: family for family in FAMILIES}
