"""Removing what no snapshot in the storage needs any more, and finding out whether what they need is there."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from sandyard.sandboxes.remote.intents import CLOCKS, sweeping
from sandyard.sandboxes.remote.manifest import CHUNKS, LAYERS, SNAPSHOTS, LayerManifest, SnapshotManifest, layer_key
from sandyard.store.blobs import BlobDamaged, BlobInfo, BlobMissing, BlobStore
from sandyard.store.blobs.chunks import chunk_key, decode

_AT_ONCE = 16


@dataclass(slots=True)
class Sweep:
    """`garbage` is what nobody needs and is old enough; `removed` of it, unless this was a trial. `young` is left for
    later. `snapshots` stay."""

    snapshots: int = 0
    kept_bytes: int = 0
    garbage: int = 0
    garbage_bytes: int = 0
    removed: int = 0
    removed_bytes: int = 0
    young: int = 0


@dataclass(slots=True)
class Found:
    """What snapshots need, by the names of objects, and what is wrong with it."""

    snapshots: int = 0
    layers: dict[str, LayerManifest] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)  # digest: length
    problems: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)  # digests of chunks that are there and not what they should be
    removed: int = 0  # of them


async def sweep(blobs: BlobStore, grace_seconds: float, *, dry_run: bool = False) -> Sweep:
    """Remove layers and chunks, of all tenants, that no snapshot needs and that are older than `grace_seconds` by the
    storage's clock. Safe beside everything else, and to be killed at any point.

    Raises `Conflict` while something is being uploaded; `BlobDamaged` where a snapshot or a layer cannot be read, as
    nobody knows then what it needs: nothing is removed."""
    async with sweeping(blobs) as now:
        found = await needed(blobs)
        if found.problems:
            raise BlobDamaged(f"{blobs.name}: {found.problems[0]}", remedy="remove that snapshot, then sweep again")
        result = Sweep(snapshots=found.snapshots)
        oldest = now - grace_seconds
        # A layer goes before its chunks, and before what it is the difference to: whoever sees one may count on all.
        layers = await _garbage(blobs.list(LAYERS), {layer_key(d) for d in found.layers}, oldest, result)
        chunks = await _garbage(blobs.list(CHUNKS), {chunk_key(d) for d in found.chunks}, oldest, result)
        chunks += await _garbage(blobs.list(CLOCKS), set(), oldest, result)
        if not dry_run:
            for info in await _by_need(blobs, layers):
                await _remove(blobs, info, result)
            gate = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(_remove(blobs, info, result, gate) for info in chunks))
        return result


async def verify(blobs: BlobStore, *, deep: bool = False, repair: bool = False) -> Found:
    """Whether every snapshot in the storage has all it needs; `deep` reads every chunk, and `repair` removes those that
    are damaged, so that the next push of a node that has them sends them again.

    Raises `Conflict` where there is something to remove while something is being uploaded."""
    found = await needed(blobs)
    there = {info.key: info.size async for info in blobs.list(CHUNKS)}
    gate = asyncio.Semaphore(_AT_ONCE)

    async def check(digest: str, length: int) -> None:
        async with gate:
            if chunk_key(digest) not in there:
                found.problems.append(f"chunk {digest} is gone")
            elif deep or repair:
                try:
                    await _read(blobs, digest, length)
                except BlobDamaged as error:
                    found.problems.append(error.message)
                    found.damaged.add(digest)
                except BlobMissing as error:
                    found.problems.append(error.message)

    await asyncio.gather(*(check(digest, length) for digest, length in found.chunks.items()))
    if repair and found.damaged:
        async with sweeping(blobs):
            await _drop_damaged(blobs, found)
    return found


async def _drop_damaged(blobs: BlobStore, found: Found) -> None:
    """Those that still are: reading everything took long, and nobody was kept from uploading meanwhile."""
    for digest in sorted(found.damaged):
        try:
            await _read(blobs, digest, found.chunks[digest])
        except BlobDamaged:
            await blobs.delete(chunk_key(digest))
            found.removed += 1
        except BlobMissing:
            continue


async def _read(blobs: BlobStore, digest: str, length: int) -> None:
    """Raises `BlobDamaged`, `BlobMissing`."""
    await asyncio.to_thread(decode, await blobs.get(chunk_key(digest)), digest, length)


async def needed(blobs: BlobStore) -> Found:
    """Everything that the snapshots of all tenants need."""
    found = Found()
    async for info in blobs.list(SNAPSHOTS):
        found.snapshots += 1
        try:
            manifest = SnapshotManifest.parse(await blobs.get(info.key), info.key)
        except BlobMissing:  # removed since it was listed
            found.snapshots -= 1
            continue
        except BlobDamaged as error:
            found.problems.append(error.message)
            continue
        for digest in manifest.layers:
            await _follow(blobs, digest, found)
    return found


async def _follow(blobs: BlobStore, digest: str, found: Found) -> None:
    while digest not in found.layers:
        try:
            manifest = LayerManifest.parse(await blobs.get(layer_key(digest)), digest)
        except (BlobDamaged, BlobMissing) as error:
            found.problems.append(error.message)
            return
        found.layers[digest] = manifest
        found.chunks.update({name: length for _, length, name in manifest.chunks})
        if not manifest.parents:
            return
        digest = manifest.parents[0]


async def _garbage(listed: AsyncIterator[BlobInfo], live: set[str], oldest: float, result: Sweep) -> list[BlobInfo]:
    doomed: list[BlobInfo] = []
    async for info in listed:
        if info.key in live:
            result.kept_bytes += info.size
        elif info.changed_at > oldest:
            result.young += 1
        else:
            doomed.append(info)
            result.garbage += 1
            result.garbage_bytes += info.size
    return doomed


async def _by_need(blobs: BlobStore, layers: Sequence[BlobInfo]) -> list[BlobInfo]:
    """Differences before what they are the difference to. One that cannot be read needs nothing."""
    parents: dict[str, str | None] = {}
    for info in layers:
        text = await blobs.get(info.key)
        digest = info.key.rpartition("/")[2]
        whole = hashlib.sha256(text).hexdigest() == digest
        manifest = LayerManifest.parse(text, digest) if whole else None
        parents[digest] = manifest.parents[0] if manifest is not None and manifest.parents else None

    def depth(digest: str | None) -> int:
        steps = 0
        while digest is not None:
            digest, steps = parents.get(digest), steps + 1
        return steps

    return sorted(layers, key=lambda info: depth(info.key.rpartition("/")[2]), reverse=True)


async def _remove(blobs: BlobStore, info: BlobInfo, result: Sweep, gate: asyncio.Semaphore | None = None) -> None:
    async with gate or asyncio.Semaphore(1):
        await blobs.delete(info.key)
    result.removed += 1
    result.removed_bytes += info.size
