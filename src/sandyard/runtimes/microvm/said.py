"""What a VMM says, as what it should be: there is a hostile guest inside it, and it may be no QEMU any more.

Nothing that came from it is turned into text but text: what is nested deep enough cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SHOWN = 300
_NUMBER_MAX = 2**31 - 1


class Odd(ValueError):
    """It is not."""


def record(said: object) -> Mapping[str, Any]:
    """Raises `Odd`, as all of these do."""
    if not isinstance(said, dict):
        raise Odd(f"{_kind(said)} where an object is due")
    return said


def records(said: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(said, list):
        raise Odd(f"{_kind(said)} where a list is due")
    return [record(each) for each in said]


def part(said: object, name: str) -> object:
    """Of an object, that has to be there."""
    found = record(said)
    if name not in found:
        raise Odd(f"an object without {name}")
    return found[name]


def text(said: object) -> str:
    if not isinstance(said, str):
        raise Odd(f"{_kind(said)} where text is due")
    return said


def number(said: object) -> int:
    """Of a descriptor, or of a set of them."""
    if not isinstance(said, int) or isinstance(said, bool):
        raise Odd(f"{_kind(said)} where a number is due")
    if not 0 <= said <= _NUMBER_MAX:
        raise Odd("a number that no descriptor has")
    return said


def shown(said: object) -> str:
    """For a message: short, and nothing in it that a terminal, or a writer of text, would stumble at."""
    return printable(said[:_SHOWN]) if isinstance(said, str) else _kind(said)


def printable(text: str) -> str:
    """What a guest may have written, for a log or a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _kind(said: object) -> str:
    return f"a {type(said).__name__}"
