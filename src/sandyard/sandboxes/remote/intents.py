"""How uploads and the removal of garbage keep out of each other's way, with nothing but the storage itself.

Who sends first writes `uploads/<id>`, then looks for `sweeps/`; who sweeps first writes `sweeps/<id>`, then looks for
`uploads/`. Since whoever comes second sees the other, no sweep removes a chunk that an upload counts on. What a
killed process left is known by its age, by the storage's own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator

import structlog

from sandyard.errors import Conflict
from sandyard.store.blobs import BlobError, BlobInfo, BlobStore

log = structlog.get_logger("sandyard.remote")

UPLOADS, SWEEPS, CLOCKS = "uploads", "sweeps", "clocks"
FRESH_SECONDS = 1800.0  # without a word for so long, one was killed
RENEW_SECONDS = 300.0
_WAIT_SECONDS = 2.0


@contextlib.asynccontextmanager
async def uploading(blobs: BlobStore, patience: float = 600.0) -> AsyncIterator[None]:
    """While chunks are sent and counted on. Raises `Conflict` where a sweep lasts longer than `patience` seconds."""
    async with _said(blobs, UPLOADS):
        deadline = time.monotonic() + patience
        while await fresh(blobs, SWEEPS):
            if time.monotonic() > deadline:
                raise Conflict(f"{blobs.name}: garbage is being removed", remedy="try again later")
            await asyncio.sleep(_WAIT_SECONDS)
        yield


@contextlib.asynccontextmanager
async def sweeping(blobs: BlobStore) -> AsyncIterator[float]:
    """While garbage is looked for and removed; what time it is by the storage's clock.

    Raises `Conflict` while something is being uploaded."""
    async with _said(blobs, SWEEPS) as key:
        if await fresh(blobs, UPLOADS):
            raise Conflict(f"{blobs.name}: snapshots are being uploaded", remedy="try again later")
        mine = await blobs.head(key)
        yield mine.changed_at if mine is not None else time.time()


async def fresh(blobs: BlobStore, folder: str) -> list[BlobInfo]:
    """Who is at work; what killed ones left behind is removed."""
    found = [info async for info in blobs.list(folder)]
    if not found:
        return []
    clock = f"{CLOCKS}/{os.urandom(8).hex()}"
    await blobs.put(clock, b"")
    try:
        now = await blobs.head(clock)
    finally:
        await blobs.delete(clock)
    limit = (now.changed_at if now is not None else time.time()) - FRESH_SECONDS
    for info in found:
        if info.changed_at < limit:
            await blobs.delete(info.key)
    return [info for info in found if info.changed_at >= limit]


@contextlib.asynccontextmanager
async def _said(blobs: BlobStore, folder: str) -> AsyncIterator[str]:
    key = f"{folder}/{os.urandom(10).hex()}"
    await blobs.put(key, b"")
    renewing = asyncio.create_task(_renew(blobs, key))
    try:
        yield key
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with contextlib.suppress(BlobError):  # it goes by its age
            await asyncio.shield(blobs.delete(key))


async def _renew(blobs: BlobStore, key: str) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            await blobs.put(key, b"")
        except BlobError as error:
            log.warning("what is at work could not be said", blobs=blobs.name, error=str(error))
