"""What a sandbox makes the server say: enough to find out why, never enough to fill a disk."""

from __future__ import annotations

import time
from typing import Any

import structlog

log = structlog.get_logger("sandyard.network")

LINES = 20
PERIOD = 60.0


class Voice:
    """Logs for one sandbox, `LINES` lines in `PERIOD` seconds; the next period tells how many were left out."""

    def __init__(self, sandbox_id: str) -> None:
        self._sandbox_id = sandbox_id
        self._ends = 0.0
        self._said = 0

    def say(self, event: str, **fields: Any) -> None:
        now = time.monotonic()
        if now >= self._ends:
            if self._said > LINES:
                log.info("network lines left out", sandbox=self._sandbox_id, count=self._said - LINES)
            self._ends, self._said = now + PERIOD, 0
        self._said += 1
        if self._said <= LINES:
            log.info(event, sandbox=self._sandbox_id, **fields)
