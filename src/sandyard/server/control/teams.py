"""`/teams`: a tenant as E2B's tools see it, and how many sandboxes it had when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from sandyard.errors import BadRequest, NotFound
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.load import Load

router = APIRouter(tags=["teams"])

Moment = Annotated[int | None, Query(ge=0, le=10**12, description="Seconds since the epoch.")]


class Team(BaseModel):
    teamID: str
    name: str
    apiKey: str = ""  # keys are stored as hashes: none can be told
    isDefault: bool = True


class TeamMetric(BaseModel):
    timestamp: datetime
    timestampUnix: int
    concurrentSandboxes: int
    sandboxStartRate: float


class MaxTeamMetric(BaseModel):
    timestamp: datetime
    timestampUnix: int
    value: float


@router.get("/teams")
async def teams(tenant: Tenant) -> list[Team]:
    """The tenant of this key."""
    return [Team(teamID=tenant, name=tenant)]


@router.get("/teams/{team_id}/metrics")
async def team_metrics(
    team_id: str, here: Here, tenant: Tenant, start: Moment = None, end: Moment = None
) -> list[TeamMetric]:
    """How many sandboxes the tenant had and started, each 15 seconds of the last hour, within `start` and `end`."""
    return [
        TeamMetric(
            timestamp=_time(load),
            timestampUnix=int(load.at),
            concurrentSandboxes=load.sandboxes,
            sandboxStartRate=load.start_rate,
        )
        for load in _history(here, tenant, team_id, start, end)
    ]


@router.get("/teams/{team_id}/metrics/max")
async def max_team_metric(
    team_id: str,
    metric: Literal["concurrent_sandboxes", "sandbox_start_rate"],
    here: Here,
    tenant: Tenant,
    start: Moment = None,
    end: Moment = None,
) -> MaxTeamMetric:
    """The highest of these figures, and when it was."""
    found = _history(here, tenant, team_id, start, end)
    if not found:
        raise BadRequest("start, end: nothing is known of that time", field="start")
    figures = [(load.sandboxes if metric == "concurrent_sandboxes" else load.start_rate, load) for load in found]
    value, best = max(figures, key=lambda figure: figure[0])
    return MaxTeamMetric(timestamp=_time(best), timestampUnix=int(best.at), value=value)


def _history(here: Context, tenant: str, team_id: str, start: int | None, end: int | None) -> Sequence[Load]:
    if team_id != tenant:
        raise NotFound(f"team '{team_id}' not found", remedy=f"this key belongs to '{tenant}'")
    if start is not None and end is not None and start > end:
        raise BadRequest(f"start: {start} is later than end, {end}", field="start")
    return here.load.between(tenant, start if start is not None else 0.0, end if end is not None else math.inf)


def _time(load: Load) -> datetime:
    return datetime.fromtimestamp(load.at, UTC)
