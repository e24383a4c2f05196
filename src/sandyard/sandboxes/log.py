"""What happened to a sandbox, line by line: its life, its processes, the output of its start command.

In memory and bounded: the newest lines of a sandbox, and those of the recently dead. What a user's
command prints is not stored.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

LINES = 1000
LINE_BYTES = 4096
TOTAL_BYTES = 256 * 1024  # of one sandbox
DEAD_BYTES = 32 << 20  # of all that died
DEAD_SECONDS = 24 * 3600.0
_ENTRY_BYTES = 200  # what an entry costs beside its text


class Level(IntEnum):
    """Severity. A reader asks for a level and what is worse."""

    DEBUG = 10
    INFO = 20
    WARN = 30
    ERROR = 40

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`at` in seconds since the epoch, never before the entry it follows."""

    at: float
    message: str
    level: Level = Level.INFO
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def milliseconds(self) -> int:
        return int(self.at * 1000)

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + len(self.message) + sum(len(k) + len(v) for k, v in self.fields.items())


class SandboxLog:
    """The newest `LINES` entries of one sandbox, of at most `TOTAL_BYTES` characters together."""

    def __init__(self) -> None:
        self._entries: deque[LogEntry] = deque()
        self.size = 0

    def append(self, message: str, level: Level = Level.INFO, **fields: str) -> None:
        """Add a line; what is longer than `LINE_BYTES` is cut, and the oldest lines go when there are too many."""
        at = time.time()
        if self._entries:
            at = max(at, self._entries[-1].at)  # the clock may be set back; a cursor must not lose lines
        entry = LogEntry(at, _cut(message), level, {name: _cut(value) for name, value in fields.items()})
        self._entries.append(entry)
        self.size += entry.size
        while len(self._entries) > LINES or self.size > TOTAL_BYTES:
            self.size -= self._entries.popleft().size

    def read(
        self,
        *,
        cursor: int | None = None,
        limit: int = LINES,
        backward: bool = False,
        level: Level | None = None,
        search: str | None = None,
    ) -> list[LogEntry]:
        """At most `limit` entries of `cursor` (milliseconds since the epoch, inclusive) and later, in order; with
        `backward` of `cursor` and earlier, the newest first. `level` and worse; `search` is a part of the message."""
        return list(itertools.islice(self._matching(cursor, backward, level, search), limit))

    def _matching(
        self, cursor: int | None, backward: bool, level: Level | None, search: str | None
    ) -> Iterator[LogEntry]:
        for entry in reversed(self._entries) if backward else self._entries:
            if cursor is not None and (entry.milliseconds > cursor if backward else entry.milliseconds < cursor):
                continue
            if level is not None and entry.level < level:
                continue
            if search and search not in entry.message:
                continue
            yield entry


@dataclass(frozen=True, slots=True)
class _Kept:
    since: float
    tenant: str
    log: SandboxLog
    size: int  # when it was kept: a late line must not spoil the sum


class DeadLogs:
    """Logs of the recently dead, by sandbox id: a day long, `DEAD_BYTES` at most."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, _Kept] = OrderedDict()
        self._size = 0

    def keep(self, sandbox_id: str, tenant: str, log: SandboxLog) -> None:
        self._drop(sandbox_id)
        self._logs[sandbox_id] = _Kept(time.monotonic(), tenant, log, log.size)
        self._size += log.size
        oldest = time.monotonic() - DEAD_SECONDS
        while self._logs and (self._size > DEAD_BYTES or next(iter(self._logs.values())).since < oldest):
            self._drop(next(iter(self._logs)))

    def get(self, tenant: str, sandbox_id: str) -> SandboxLog | None:
        """None where none is kept, or it is another tenant's."""
        known = self._logs.get(sandbox_id)
        return known.log if known is not None and known.tenant == tenant else None

    def _drop(self, sandbox_id: str) -> None:
        known = self._logs.pop(sandbox_id, None)
        if known is not None:
            self._size -= known.size


def _cut(text: str) -> str:
    if not text.isascii():  # a command line may hold half of a surrogate pair, which no answer could
        text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= LINE_BYTES else text[: LINE_BYTES - 1] + "…"
