"""`/store`: what the node keeps on its disk, for its operator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from sandyard.errors import Forbidden
from sandyard.images.garbage.base import Checkup, Finding
from sandyard.images.garbage.collect import Outcome
from sandyard.images.oci.room import Watermarks
from sandyard.sandboxes.storage.usage import Use, usage
from sandyard.server.auth import DEFAULT_TENANT
from sandyard.server.control.context import Here, Tenant


async def operator(tenant: Tenant) -> None:
    """Raises `Forbidden`: names and sizes of what all tenants keep are the operator's to see."""
    if tenant != DEFAULT_TENANT:
        raise Forbidden("the store of the node is its operator's", remedy="use the key in secrets/api-key")


router = APIRouter(prefix="/store", tags=["sandyard"], dependencies=[Depends(operator)])


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class UseView(BaseModel):
    kind: str
    path: str
    sizeBytes: int
    count: int


class StoreView(BaseModel):
    """Of `layers of images`, the watermarks."""

    lowBytes: int
    highBytes: int
    kinds: list[UseView]


class Collection(_Body):
    """`freeBytes`: at least so many, where they can be; without it what is too much by the watermarks. `all`: every
    layer that nobody uses."""

    dryRun: bool = False
    all: bool = False
    freeBytes: int | None = Field(default=None, ge=0, le=1 << 60)


class LayerView(BaseModel):
    """`why` it stays; empty for one that goes. `usedAt` in seconds since the epoch."""

    key: str
    sizeBytes: int
    usedAt: float
    why: str


class Collected(BaseModel):
    usedBytes: int
    freedBytes: int
    lowBytes: int
    highBytes: int
    layers: list[LayerView]


class Verification(_Body):
    deep: bool = False
    repair: bool = False


class FindingView(BaseModel):
    name: str
    problem: str
    path: str | None


class CheckupView(BaseModel):
    kind: str
    count: int
    sizeBytes: int
    unknown: int
    damaged: list[FindingView]
    orphans: list[FindingView]


class Verified(BaseModel):
    kinds: list[CheckupView]


@router.get("")
async def show(here: Here) -> StoreView:
    """How much of the disk is what."""
    settings = here.manager.settings
    return store_view(Watermarks.of(settings), await asyncio.to_thread(usage, settings))


@router.post("/gc")
async def gc(body: Collection, here: Here) -> Collected:
    """Remove layers of images that nobody uses, the longest unused first."""
    free = -1 if body.all else body.freeBytes
    return collected(await here.keeper.collect(free, dry_run=body.dryRun))


@router.post("/verify")
async def verify(body: Verification, here: Here) -> Verified:
    """Check everything that is kept; `deep` reads all of it."""
    return verified(await here.keeper.check(deep=body.deep, repair=body.repair))


def store_view(marks: Watermarks, uses: Sequence[Use]) -> StoreView:
    """What the disk is used for, as it is shown."""
    kinds = [UseView(kind=u.kind, path=str(u.path), sizeBytes=u.size_bytes, count=u.count) for u in uses]
    return StoreView(lowBytes=marks.low, highBytes=marks.high, kinds=kinds)


def collected(outcome: Outcome) -> Collected:
    """What a collection came to, as it is shown."""
    return Collected(
        usedBytes=outcome.used_bytes,
        freedBytes=outcome.freed_bytes,
        lowBytes=outcome.marks.low,
        highBytes=outcome.marks.high,
        layers=[
            LayerView(key=v.layer.key, sizeBytes=v.layer.disk_bytes, usedAt=v.layer.used_at, why=v.why)
            for v in outcome.verdicts
        ],
    )


def verified(found: Sequence[Checkup]) -> Verified:
    """What a verification came to, as it is shown."""
    return Verified(
        kinds=[
            CheckupView(
                kind=checkup.kind,
                count=checkup.count,
                sizeBytes=checkup.size_bytes,
                unknown=checkup.unknown,
                damaged=[_finding(each) for each in checkup.damaged],
                orphans=[_finding(each) for each in checkup.orphans],
            )
            for checkup in found
        ]
    )


def _finding(found: Finding) -> FindingView:
    return FindingView(name=found.name, problem=found.problem, path=str(found.path) if found.path else None)
