"""What a build says: in memory while it runs, in a file of lines afterwards, bounded either way."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.images.build import Level

LEVELS = (Level.DEBUG, Level.INFO, Level.WARN, Level.ERROR)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`at` in seconds since the epoch; `step` "base", "finalize" or a step's number."""

    at: float
    message: str
    level: Level = Level.INFO
    step: str | None = None


class BuildLog:
    """Called by the engine. Past `limit` entries only one more is kept: that the rest was dropped; errors still are."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._entries: list[LogEntry] = []
        self._saved = 0

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
        if len(self._entries) >= self._limit:
            if len(self._entries) == self._limit:
                self._entries.append(LogEntry(time.time(), "the log is full: what follows is left out", Level.WARN))
            if level is not Level.ERROR or len(self._entries) > self._limit + 32:
                return
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
