"""Wildcards of COPY and ADD: Go's `filepath.Match`, which Docker's reference names, in bounded time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_Test = Callable[[str], bool]
_MAGIC = frozenset("*?[\\")


class BadPattern(ValueError):
    """A pattern that ends too early."""


def has_magic(part: str) -> bool:
    return not _MAGIC.isdisjoint(part)


def matcher(pattern: str) -> _Test:
    """Whether a name without slashes matches. Raises `BadPattern`."""
    tests = _tests(pattern)

    def matches(name: str) -> bool:
        at = index = 0
        star: tuple[int, int] | None = None  # where to go on when the rest does not fit: one star more is enough
        while index < len(name):
            if at < len(tests) and (test := tests[at]) is None:
                star = (at, index)
                at += 1
            elif at < len(tests) and test is not None and test(name[index]):
                at += 1
                index += 1
            elif star is not None:
                star = (star[0], star[1] + 1)
                at, index = star[0] + 1, star[1]
            else:
                return False
        return all(test is None for test in tests[at:])

    return matches


def _tests(pattern: str) -> Sequence[_Test | None]:
    """One test for each character; None for any number of them."""
    tests: list[_Test | None] = []
    at = 0
    while at < len(pattern):
        mark = pattern[at]
        at += 1
        if mark == "*":
            tests.append(None)
        elif mark == "?":
            tests.append(lambda _: True)
        elif mark == "[":
            test, at = _class(pattern, at)
            tests.append(test)
        else:
            if mark == "\\":
                mark, at = _one(pattern, at - 1)
            tests.append(mark.__eq__)
    return tests


def _class(pattern: str, at: int) -> tuple[_Test, int]:
    negated = pattern[at : at + 1] == "^"
    at += negated
    ranges: list[tuple[str, str]] = []
    while not (ranges and pattern[at : at + 1] == "]"):
        low, at = _one(pattern, at, within=True)
        high = low
        if pattern[at : at + 1] == "-":
            high, at = _one(pattern, at + 1, within=True)
        ranges.append((low, high))
    return lambda letter: any(low <= letter <= high for low, high in ranges) != negated, at + 1


def _one(pattern: str, at: int, *, within: bool = False) -> tuple[str, int]:
    if within and pattern[at : at + 1] in ("-", "]"):
        raise BadPattern(pattern)
    if pattern[at : at + 1] == "\\":
        at += 1
    if at >= len(pattern):
        raise BadPattern(pattern)
    return pattern[at], at + 1
