"""What a build says: in memory while it runs, in a file of lines afterwards, bounded either way."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.images.build import Level

MAX_CHARS = 4 << 20  # of all entries together
LEVELS = (Level.DEBUG, Level.INFO, Level.WARN, Level.ERROR)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`at` in seconds since the epoch; `step` "base", "finalize" or a step's number."""

    at: float
    message: str
    level: Level = Level.INFO
    step: str | None = None


class BuildLog:
    """Called by the engine. Past `limit` entries, or `MAX_CHARS`, one more says that the rest is left out; a few
    errors are kept still."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._entries: list[LogEntry] = []
        self._saved = 0
        self._chars = 0
        self._full = False
        self._errors_left = 32

    @classmethod
    def load(cls, path: Path, limit: int) -> BuildLog:
        """The log of an earlier build; empty where nothing is kept of it."""
        made = cls(path, limit)
        try:
            lines = path.read_text("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return made
        for line in lines[: limit + 64]:
            try:
                record = json.loads(line)
                made._entries.append(LogEntry(record["t"], record["m"], Level(record["l"]), record.get("s")))
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a server that was killed
        made._saved = len(made._entries)
        return made

    def __call__(self, message: str, *, level: Level = Level.INFO, step: str | None = None) -> None:
        if not self._full and (len(self._entries) >= self._limit or self._chars > MAX_CHARS):
            self._full = True
            self._entries.append(LogEntry(time.time(), "the log is full: what follows is left out", Level.WARN))
        if self._full:
            if level is not Level.ERROR or self._errors_left <= 0:
                return
            self._errors_left -= 1
        self._chars += len(message)
        self._entries.append(LogEntry(time.time(), message, level, step))

    def entries(self, level: Level | None = None) -> Sequence[LogEntry]:
        """Of that level or a graver one, in their order."""
        if level is None:
            return self._entries
        least = LEVELS.index(level)
        return [entry for entry in self._entries if LEVELS.index(entry.level) >= least]

    def save(self) -> None:
        """Append what is new to the file. Blocking. Raises `OSError`."""
        new = self._entries[self._saved :]
        if not new:
            return
        lines = [json.dumps({"t": e.at, "m": e.message, "l": e.level, "s": e.step}) for e in new]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))
        self._saved += len(new)
