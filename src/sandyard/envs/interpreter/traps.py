"""What ends a run of the interpreter from inside, and what no program can catch."""

from __future__ import annotations

from collections.abc import Callable


class Trap(BaseException):
    """The interpreter met what it does not execute as CPython does.

    Not an `Exception`: neither the program's `except` nor the interpreter's own may swallow it.
    `on_trap`, where set, is called when one is made.
    """

    on_trap: Callable[[Trap], None] | None = None

    def __init__(self, construct: object) -> None:
        super().__init__(construct)
        self.construct = " ".join(str(construct).split())[:300]
        self.line = 0
        self.column = 0
        if Trap.on_trap is not None:
            Trap.on_trap(self)


class BreakLoop(BaseException):
    """`break`: no `except` of the program may see it."""


class ContinueLoop(BaseException):
    """`continue`: no `except` of the program may see it."""


class ReturnValue(BaseException):
    """`return`: no `except` of the program may see it."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value
