"""Sending layers: chunks that are not there yet, then what names them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Runtime
from sandyard.sandboxes.remote.known import Known
from sandyard.sandboxes.remote.manifest import LayerManifest, layer_key
from sandyard.sandboxes.remote.source import Piece, Source, opened
from sandyard.sandboxes.remote.transfer import Transfer
from sandyard.store.blobs import BlobDamaged, BlobMissing, BlobStore
from sandyard.store.blobs.chunks import chunk_key, digest_of, encode

_DEPTH = 64  # of differences on each other: a circle is none


class Uploader:
    """At most `blobs.concurrency` chunks are in memory or on their way, however many layers there are. To be used
    within `intents.uploading`: what was there when it was looked for then stays there."""

    def __init__(self, blobs: BlobStore, known: Known, settings: Settings, runtime: Runtime) -> None:
        self._blobs = blobs
        self._runtime = runtime
        self._known = known
        self._chunk = settings.blobs.chunk_kb << 10
        self._uid_base = settings.container.uid_base
        self._room = asyncio.Semaphore(settings.blobs.concurrency)

    async def layer(self, layer: Path, transfer: Transfer, depth: int = 0) -> str:
        """See to it that a layer and all it needs is in the storage; the digest of its manifest. A second try goes
        on where the one before ended.

        Raises `BlobError`; `SandboxError` for a layer that is damaged or gone."""
        if depth > _DEPTH:
            raise SandboxError(f"layer {layer} is more than {_DEPTH} differences deep")
        digest = await asyncio.to_thread(self._known.get, layer)
        if digest is not None and await self._stands(digest, depth):
            return digest
        with ExitStack() as stack:
            opening = opened(layer, self._chunk, self._uid_base, self._runtime.needs)
            source = await asyncio.to_thread(stack.enter_context, opening)
            parents = [await self.layer(source.parent, transfer, depth + 1)] if source.parent is not None else []
            transfer.total_bytes += source.expected
            chunks = await self._send(source, transfer)
        size = source.size or (chunks[-1][0] + chunks[-1][1] if chunks else 0)
        manifest = LayerManifest(source.kind, source.name, size, self._chunk, parents, chunks)
        digest = manifest.digest()
        await self._blobs.put(layer_key(digest), manifest.text())
        await asyncio.to_thread(self._known.put, layer, manifest)
        return digest

    async def _stands(self, digest: str, depth: int) -> bool:
        """Whether a layer is there with all that it needs. Its chunks are looked for one by one: somebody may have
        removed some that were damaged."""
        if depth > _DEPTH:
            return False
        try:
            manifest = LayerManifest.parse(await self._blobs.get(layer_key(digest)), digest)
        except (BlobMissing, BlobDamaged):
            return False
        for parent in manifest.parents:
            if not await self._stands(parent, depth + 1):
                return False
        wanted = {name: length for _, length, name in manifest.chunks}
        looks = [asyncio.create_task(self._there_in_turn(*each)) for each in wanted.items()]
        try:
            return all([await look for look in looks])
        finally:
            for look in looks:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)

    async def _there_in_turn(self, digest: str, length: int) -> bool:
        async with self._room:
            return await self._there(digest, length)

    async def _there(self, digest: str, length: int) -> bool:
        """Whether a chunk is there, and of a size that `encode` may give it."""
        found = await self._blobs.head(chunk_key(digest))
        return found is not None and 1 < found.size <= length + 1

    async def _send(self, source: Source, transfer: Transfer) -> list[tuple[int, int, str]]:
        chunks: list[tuple[int, int, str]] = []
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._room.acquire()
                try:
                    piece = await asyncio.to_thread(_next, source.pieces)
                    if piece is None:
                        break
                    task = asyncio.create_task(self._one(piece, transfer, chunks))
                except BaseException:
                    self._room.release()
                    raise
                tasks.add(task)
                task.add_done_callback(lambda _: self._room.release())
                done = {each for each in tasks if each.done()}
                tasks -= done
                for each in done:
                    each.result()
            self._room.release()
            for each in list(tasks):
                await each
        except BaseException:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return sorted(chunks)

    async def _one(self, piece: Piece, transfer: Transfer, chunks: list[tuple[int, int, str]]) -> None:
        offset, data = piece
        digest = await asyncio.to_thread(digest_of, data)
        if await self._there(digest, len(data)):
            transfer.skipped_bytes += len(data)
        else:
            stored = await asyncio.to_thread(encode, data)
            sent = await self._blobs.put(chunk_key(digest), stored)
            transfer.moved_bytes += sent  # not in one line: others add to it while this one waits
        transfer.done_bytes += len(data)
        transfer.total_bytes = max(transfer.total_bytes, transfer.done_bytes)
        chunks.append((offset, len(data), digest))


def _next(pieces: Iterator[Piece]) -> Piece | None:
    return next(pieces, None)
