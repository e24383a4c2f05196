"""Blobs in memory: the twin for tests of what stands on blob storage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from sandyard.store.blobs.base import (
    BlobInfo,
    BlobMissing,
    BlobStore,
    Content,
    check_key,
    check_prefix,
    check_range,
    pieces_of,
)

_PIECE = 1 << 20


class MemoryBlobs(BlobStore):
    """`objects` is what it holds, for tests to look at and to damage."""

    name = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}

    async def put(self, key: str, content: Content) -> int:
        check_key(key)
        data = b"".join([piece async for piece in pieces_of(content)])
        self.objects[key] = (data, time.time())
        return len(data)

    async def stream(self, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        check_range(start, length)
        if check_key(key) not in self.objects:
            raise BlobMissing(f"{self.name}: there is no {key}")
        data = self.objects[key][0][start:]
        data = data if length is None else data[:length]
        for at in range(0, len(data), _PIECE):
            yield data[at : at + _PIECE]

    async def head(self, key: str) -> BlobInfo | None:
        found = self.objects.get(check_key(key))
        return BlobInfo(key, len(found[0]), found[1]) if found is not None else None

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        folder = check_prefix(prefix)
        for key, (data, changed_at) in sorted(self.objects.items()):
            if not folder or key.startswith(f"{folder}/"):
                yield BlobInfo(key, len(data), changed_at)

    async def delete(self, key: str) -> None:
        self.objects.pop(check_key(key), None)
