"""`/snapshots` and forks: copies of a sandbox, with its memory where the runtime can. The answers say so."""

from __future__ import annotations

import base64
import binascii

from fastapi import APIRouter, Response

from sandyard.errors import BadRequest, CapacityError, SandyardError
from sandyard.sandboxes import Sandbox, Snapshot
from sandyard.sandboxes.catalog import Reference
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.models import (
    ErrorBody,
    ForkResult,
    ForkSandbox,
    NewSnapshot,
    SnapshotView,
)
from sandyard.server.control.sandboxes import view_of

FIDELITY = "x-sandyard-fidelity"
FILES, MEMORY = "files", "memory"
PAGE_LIMIT = 100

router = APIRouter(tags=["snapshots"])


@router.post("/sandboxes/{sandbox_id}/snapshots", status_code=201)
async def create(
    sandbox_id: str, here: Here, tenant: Tenant, response: Response, body: NewSnapshot | None = None
) -> SnapshotView:
    """Keep what the sandbox is now, its files and where it can be its memory, for any number of sandboxes to start
    from. It goes on. A `name` that is a snapshot's already gets this state as its newest."""
    sandbox = here.manager.get(tenant, sandbox_id)
    wanted = body or NewSnapshot()
    here.manager.copying.check(sandbox, memory=wanted.memory)
    made = await here.manager.copying.snapshot(sandbox, wanted.name)
    response.headers[FIDELITY] = MEMORY if made.memory else FILES
    return SnapshotView.of(made)


@router.get("/snapshots")
async def list_snapshots(
    here: Here,
    tenant: Tenant,
    response: Response,
    sandboxID: str | None = None,
    name: str | None = None,
    limit: int | None = None,
    nextToken: str | None = None,
) -> list[SnapshotView]:
    """One page of snapshots, the newest first; `X-Next-Token` leads to the next."""
    limit = PAGE_LIMIT if limit is None else limit
    if not 1 <= limit <= PAGE_LIMIT:
        raise BadRequest(f"limit: {limit} is not within 1..{PAGE_LIMIT}", field="limit")
    found = [s for s in here.manager.copying.all(tenant) if sandboxID is None or s.source == sandboxID]
    if name is not None:
        found = [s for s in found if _named(s, name)]
    if nextToken:
        mark = _token(nextToken)
        found = [s for s in found if _key(s) < mark]
    if len(found) > limit:
        at, last = _key(found[limit - 1])
        response.headers["X-Next-Token"] = base64.urlsafe_b64encode(f"{at!r}|{last}".encode()).decode()
    return [SnapshotView.of(snapshot) for snapshot in found[:limit]]


@router.get("/snapshots/{snapshot_id:path}")
async def info(snapshot_id: str, here: Here, tenant: Tenant) -> SnapshotView:
    """One snapshot, by name or id, with its size and where it came from."""
    return SnapshotView.of(here.manager.copying.get(tenant, snapshot_id))


@router.post("/sandboxes/{sandbox_id}/fork", status_code=201, response_model_exclude_none=True)
async def fork(
    sandbox_id: str, here: Here, tenant: Tenant, response: Response, body: ForkSandbox | None = None
) -> list[ForkResult]:
    """Make `count` sandboxes with the state that this one has now, running or paused. Each is one of its own, or
    says why it is not there. A status other than 201: none was attempted."""
    sandbox = here.manager.get(tenant, sandbox_id)
    wanted = body or ForkSandbox()
    seconds = here.manager.settings.sandbox.timeout if wanted.timeout is None else float(wanted.timeout)
    if seconds <= 0:
        raise BadRequest(f"timeout: {wanted.timeout} is not more than 0 seconds", field="timeout")
    memory = here.manager.copying.keeps_memory(sandbox)
    children = await here.manager.copying.fork(sandbox, wanted.count, seconds)
    response.headers[FIDELITY] = MEMORY if memory else FILES
    return [_result(here, child, memory) for child in children]


def _result(here: Context, child: Sandbox | SandyardError, memory: bool) -> ForkResult:
    if isinstance(child, Sandbox):
        return ForkResult(sandbox=view_of(here, child), memory=memory)
    code = "capacity" if isinstance(child, CapacityError) else None
    return ForkResult(error=ErrorBody(code=child.http_status, message=str(child), error_code=code))


def _named(snapshot: Snapshot, wanted: str) -> bool:
    reference = Reference.parse(wanted)
    if reference.tag not in (None, snapshot.tag):
        return False
    return reference.name in (*snapshot.template.names, snapshot.template.id)


def _key(snapshot: Snapshot) -> tuple[float, str]:
    return snapshot.build.created_at, snapshot.id


def _token(value: str) -> tuple[float, str]:
    try:
        at, _, last = base64.urlsafe_b64decode(value).decode().partition("|")
        return float(at), last
    except (binascii.Error, ValueError) as error:
        raise BadRequest("nextToken is not one that this server gave", field="nextToken") from error
