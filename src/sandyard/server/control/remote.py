"""`/remote`: snapshots in the blob storage that this node shares with others (`blobs.url`)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from sandyard.errors import Conflict
from sandyard.sandboxes.remote import RemoteSnapshots, Transfer
from sandyard.sandboxes.remote.manifest import Listed
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.models import ErrorBody

# There may be no storage, it may refuse, and it may not answer.
router = APIRouter(
    prefix="/remote", tags=["snapshots"], responses={status: {"model": ErrorBody} for status in (409, 502, 503)}
)


class RemoteSnapshotView(BaseModel):
    """`here`: this node has this state of it. `sizeBytes` as on the disk of the node that made it."""

    snapshotID: str
    templateID: str
    buildID: str
    names: list[str]
    sandboxID: str
    createdAt: datetime
    sizeBytes: int
    runtime: str
    here: bool

    @classmethod
    def of(cls, listed: Listed) -> RemoteSnapshotView:
        found = listed.manifest
        return cls(
            snapshotID=found.id,
            templateID=found.template_id,
            buildID=found.build_id,
            names=[f"{name}:{found.tag}" for name in found.names],
            sandboxID=found.source or "",
            createdAt=datetime.fromtimestamp(found.created_at, UTC),
            sizeBytes=found.size_bytes,
            runtime=found.runtime,
            here=listed.here,
        )


class TransferView(BaseModel):
    """`movedBytes` went over the wire, compressed; `skippedBytes` of `doneBytes` were there already."""

    snapshotID: str
    buildID: str
    direction: Literal["push", "pull"]
    state: Literal["waiting", "running", "done", "failed"]
    totalBytes: int
    doneBytes: int
    skippedBytes: int
    movedBytes: int
    error: str | None
    startedAt: datetime
    finishedAt: datetime | None

    @classmethod
    def of(cls, transfer: Transfer) -> TransferView:
        end = transfer.finished_at
        return cls(
            snapshotID=transfer.snapshot_id,
            buildID=transfer.build_id,
            direction=transfer.direction,
            state=transfer.state,
            totalBytes=transfer.total_bytes,
            doneBytes=transfer.done_bytes,
            skippedBytes=transfer.skipped_bytes,
            movedBytes=transfer.moved_bytes,
            error=transfer.error,
            startedAt=datetime.fromtimestamp(transfer.started_at, UTC),
            finishedAt=datetime.fromtimestamp(end, UTC) if end is not None else None,
        )


class MoveSnapshot(BaseModel):
    model_config = ConfigDict(extra="ignore")

    snapshotID: str = Field(min_length=1, max_length=300)
    direction: Literal["push", "pull"]


@router.get("/snapshots")
async def list_remote(here: Here, tenant: Tenant) -> list[RemoteSnapshotView]:
    """This tenant's snapshots in the storage, the newest first."""
    return [RemoteSnapshotView.of(each) for each in await _remote(here).list(tenant)]


@router.delete("/snapshots/{snapshot_id:path}", status_code=204)
async def remove(snapshot_id: str, here: Here, tenant: Tenant) -> Response:
    """Forget a snapshot in the storage. What this node has of it stays."""
    await _remote(here).remove(tenant, snapshot_id)
    return Response(status_code=204)


@router.post("/transfers", status_code=202)
async def move(body: MoveSnapshot, here: Here, tenant: Tenant) -> TransferView:
    """Begin to send a snapshot to the storage, or to fetch one; one that is under way already goes on."""
    remote = _remote(here)
    if body.direction == "push":
        return TransferView.of(remote.push_soon(here.manager.copying.get(tenant, body.snapshotID)))
    return TransferView.of(await remote.pull_soon(tenant, body.snapshotID))


@router.get("/transfers")
async def transfers(here: Here, tenant: Tenant) -> list[TransferView]:
    """What is under way and what lately was, the newest first."""
    return [TransferView.of(each) for each in _remote(here).transfers(tenant)]


def _remote(here: Context) -> RemoteSnapshots:
    if here.manager.remote is None:
        raise Conflict("this node has no storage for snapshots", remedy="set blobs.url and start it again")
    return here.manager.remote
