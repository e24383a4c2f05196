"""A file that fills up with checked chunks: those that are read first, then the others."""

from __future__ import annotations

import asyncio
import hashlib
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

from sandyard.runtimes.finishing import ended
from sandyard.store.blobs.base import BlobError, BlobStore
from sandyard.store.blobs.chunks import chunk_key, decode

Chunk = tuple[int, int, str]  # offset, length, SHA-256
_CALM_SECONDS = 0.2  # after a read that had to wait: who reads goes before the rest


class Filling:
    """`path` is sparse; nothing is read of it that was not checked by this object. For one event loop."""

    def __init__(
        self,
        path: Path,
        size: int,
        chunks: Sequence[Chunk],
        blobs: BlobStore,
        concurrency: int,
        busy: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads what an earlier one left, and calls `busy` with every chunk of it."""
        self.path = path
        self.fetched_bytes = 0
        self._size = size
        self._chunks = chunks
        self._starts = [offset for offset, _, _ in chunks]
        self._blobs = blobs
        self._room = asyncio.Semaphore(concurrency)
        self._have: set[int] = set()
        self._coming: dict[int, asyncio.Task[None]] = {}
        self._wanted_at = 0.0
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        os.ftruncate(self._descriptor, size)
        self._recall(busy)

    async def close(self) -> None:
        """What is on its way is called off first."""
        coming = list(self._coming.values())
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        os.close(self._descriptor)

    @property
    def whole(self) -> bool:
        return len(self._have) == len(self._chunks)

    def runs(self) -> list[tuple[int, int]]:
        """Where it has, or will have, data."""
        found: list[tuple[int, int]] = []
        for offset, length, _ in self._chunks:
            if found and found[-1][1] == offset:
                found[-1] = (found[-1][0], offset + length)
            else:
                found.append((offset, offset + length))
        return found

    async def read(self, offset: int, count: int) -> bytes:
        """Bytes of the file, zeros between its chunks. Raises `BlobError` naming the chunk, and `OSError`."""
        missing = [number for number in self._between(offset, offset + count) if number not in self._have]
        if missing:
            self._wanted_at = asyncio.get_running_loop().time()
            await asyncio.gather(*(self._bring(number) for number in missing))
            self._wanted_at = asyncio.get_running_loop().time()
        return os.pread(self._descriptor, count, offset)

    async def fill(self) -> None:
        """Fetch what is missing, one chunk after the other, while nobody waits for one. Raises like `read`."""
        for number in range(len(self._chunks)):
            if number in self._have:
                continue
            await asyncio.sleep(self._wanted_at + _CALM_SECONDS - asyncio.get_running_loop().time())
            await self._bring(number)

    def finish(self) -> None:
        """Bring the whole file to the disk. Blocking."""
        os.fchmod(self._descriptor, 0o400)
        os.fsync(self._descriptor)

    def _between(self, begin: int, end: int) -> range:
        first = max(0, bisect_right(self._starts, begin) - 1)
        if self._chunks and sum(self._chunks[first][:2]) <= begin:
            first += 1  # it ends before
        return range(first, bisect_left(self._starts, end))

    async def _bring(self, number: int) -> None:
        """Once, however many want it; nobody who gives up stops it for the others."""
        if number in self._have:
            return
        if number not in self._coming:
            task = asyncio.create_task(self._fetch(number))
            self._coming[number] = task
            task.add_done_callback(lambda done: self._come(number, done))
        await asyncio.shield(self._coming[number])

    def _come(self, number: int, task: asyncio.Task[None]) -> None:
        del self._coming[number]
        if not task.cancelled():
            task.exception()  # whoever waited was told; where nobody did, the next who wants it is

    async def _fetch(self, number: int) -> None:
        offset, length, digest = self._chunks[number]
        async with self._room:
            try:
                stored = await self._blobs.get(chunk_key(digest), limit=length + (length >> 3) + 1024)
            except BlobError as error:
                raise type(error)(f"chunk {digest} of {self.path.name}: {error.message}") from error
            data = await asyncio.to_thread(decode, stored, digest, length)
            await ended(self._write, offset, data)
        self.fetched_bytes += length
        self._have.add(number)

    def _write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done

    def _recall(self, busy: Callable[[], None]) -> None:
        """What an earlier process left is taken for what it is by its digests alone."""
        for number, (offset, length, digest) in enumerate(self._chunks):
            try:
                if os.lseek(self._descriptor, offset, os.SEEK_DATA) >= offset + length:
                    continue
            except OSError:
                return  # nothing from here on
            busy()
            if hashlib.sha256(os.pread(self._descriptor, length, offset)).hexdigest() == digest:
                self._have.add(number)
