"""What a program prints, with a bound."""

from __future__ import annotations

import builtins
from typing import Any

from sandyard.envs.interpreter.traps import Trap


class PrintedText:
    """Keeps the first `limit` characters and counts the rest. `print` is the program's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[str] = []
        self._kept = 0
        self._seen = 0

    def print(self, /, *values: Any, **options: Any) -> None:
        if options.get("file") is not None:
            raise Trap("print to a file")
        builtins.print(*values, **{**options, "file": self})

    def write(self, text: str) -> int:
        room = self._limit - self._kept
        if room > 0 and text:
            self._parts.append(text[:room])
            self._kept += len(self._parts[-1])
        self._seen += len(text)
        return len(text)

    def flush(self) -> None:
        """There is nothing behind it."""

    def take(self) -> str:
        """The text so far, which is then forgotten."""
        text, cut = "".join(self._parts), self._seen - self._kept
        self._parts, self._kept, self._seen = [], 0, 0
        return f"{text}\n[... {cut} more characters were not kept ...]\n" if cut else text
