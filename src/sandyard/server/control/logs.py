"""`/sandboxes/{id}/logs`: what happened to a sandbox, both generations of E2B's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from sandyard.sandboxes.log import Level, LogEntry
from sandyard.server.control.context import Here, Tenant

LIMIT = 1000
LAST_MOMENT = 253_402_300_799_999  # 9999-12-31, in milliseconds: no cursor lies behind it

router = APIRouter(tags=["sandboxes"])

Moment = Annotated[int | None, Query(ge=0, le=LAST_MOMENT, description="Milliseconds since the epoch.")]
Word = Literal["debug", "info", "warn", "error"]


class LogLine(BaseModel):
    timestamp: datetime
    line: str


class Entry(BaseModel):
    timestamp: datetime
    message: str
    level: Word
    fields: dict[str, str]

    @classmethod
    def of(cls, entry: LogEntry) -> Entry:
        return cls.model_validate(
            {
                "timestamp": _time(entry),
                "message": entry.message,
                "level": entry.level.word,
                "fields": dict(entry.fields),
            }
        )


class Logs(BaseModel):
    logs: list[LogLine]
    logEntries: list[Entry]


class LogsV2(BaseModel):
    logs: list[Entry]


@router.get("/sandboxes/{sandbox_id}/logs", deprecated=True)
async def logs(
    sandbox_id: str,
    here: Here,
    tenant: Tenant,
    start: Moment = None,
    limit: Annotated[int, Query(ge=0, le=2**31 - 1)] = LIMIT,
) -> Logs:
    """Log lines from `start` on, the oldest first; of a sandbox that lives or died within a day."""
    found = here.manager.log(tenant, sandbox_id).read(cursor=start, limit=min(limit, LIMIT))
    lines = [LogLine(timestamp=_time(entry), line=entry.message) for entry in found]
    return Logs(logs=lines, logEntries=[Entry.of(entry) for entry in found])


@router.get("/v2/sandboxes/{sandbox_id}/logs")
async def logs_v2(
    sandbox_id: str,
    here: Here,
    tenant: Tenant,
    cursor: Moment = None,
    limit: Annotated[int, Query(ge=0, le=LIMIT)] = LIMIT,
    direction: Literal["forward", "backward"] = "forward",
    level: Word | None = None,
    search: Annotated[str | None, Query(max_length=256)] = None,
) -> LogsV2:
    """Log entries of `cursor` and later, or with direction `backward` of `cursor` and earlier, the newest first."""
    log = here.manager.log(tenant, sandbox_id)
    least = Level[level.upper()] if level is not None else None
    found = log.read(cursor=cursor, limit=limit, backward=direction == "backward", level=least, search=search)
    return LogsV2(logs=[Entry.of(entry) for entry in found])


def _time(entry: LogEntry) -> datetime:
    return datetime.fromtimestamp(entry.at, UTC)
