"""How far a snapshot on its way is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["push", "pull"]
State = Literal["waiting", "running", "done", "failed"]


@dataclass(slots=True)
class Transfer:
    """`total_bytes` is what is known so far to have to be looked at; of `done_bytes` those that were there already
    are `skipped_bytes`, and `moved_bytes` went over the wire, compressed. Times are seconds since the epoch."""

    tenant: str
    snapshot_id: str
    build_id: str
    direction: Direction
    state: State = "waiting"
    total_bytes: int = 0
    done_bytes: int = 0
    skipped_bytes: int = 0
    moved_bytes: int = 0
    error: str | None = None
    started_at: float = field(default_factory=time.time)
    finished_at: float | None = None

    def finish(self, error: str | None = None) -> None:
        self.state, self.error, self.finished_at = "failed" if error else "done", error, time.time()

    def renew(self) -> None:
        """It begins from the start."""
        self.total_bytes = self.done_bytes = self.skipped_bytes = 0
        self.error, self.finished_at = None, None
