"""Blobs as files below one directory, which may be a network file system that several nodes mount."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from sandyard.runtimes.durable import sync
from sandyard.store.blobs.base import (
    BlobError,
    BlobFull,
    BlobInfo,
    BlobMissing,
    BlobRefused,
    BlobStore,
    Content,
    check_key,
    check_prefix,
    check_range,
    pieces_of,
)

_PIECE = 1 << 20
_DRAFT = "~draft-"  # no key has a tilde
_STALE_SECONDS = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalBlobs(BlobStore):
    """An object is written to a name nobody looks at, brought to the disk, and renamed."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    async def put(self, key: str, content: Content) -> int:
        path = self._path(key)
        draft = path.with_name(f"{_DRAFT}{os.urandom(8).hex()}")
        size = 0
        with self._named(key):
            await asyncio.to_thread(path.parent.mkdir, 0o700, True, True)
            file = await asyncio.to_thread(open, draft, "xb", 0)
        try:
            with file:
                async for piece in pieces_of(content):
                    with self._named(key):
                        size += await asyncio.to_thread(_write, file, piece)
                with self._named(key):
                    await asyncio.to_thread(_finish, file, draft, path)
        finally:
            draft.unlink(missing_ok=True)
        return size

    async def stream(self, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        check_range(start, length)
        path, left = self._path(key), length
        with self._named(key), await asyncio.to_thread(open, path, "rb", 0) as file:
            file.seek(start)
            while left is None or left > 0:
                piece = await asyncio.to_thread(file.read, _PIECE if left is None else min(_PIECE, left))
                if not piece:
                    return
                left = left if left is None else left - len(piece)
                yield piece

    async def head(self, key: str) -> BlobInfo | None:
        path = self._path(key)
        with self._named(key):
            try:
                found = await asyncio.to_thread(path.stat)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return BlobInfo(key, found.st_size, found.st_mtime)

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        folder = self._root / check_prefix(prefix)
        with self._named(prefix):
            found = await asyncio.to_thread(lambda: list(_walk(self._root, folder)))
        for info in found:
            yield info

    async def delete(self, key: str) -> None:
        with self._named(key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            await asyncio.to_thread(self._path(key).unlink)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """The errors of the file system as ours."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise BlobMissing(f"{self.name}: there is no {key}") from error
        except PermissionError as error:
            raise BlobRefused(f"{self.name}: {key}: {error.strerror}") from error
        except OSError as error:
            kind = BlobFull if error.errno in _FULL else BlobError
            raise kind(f"{self.name}: {key}: {error.strerror or error}") from error


def _write(file: IO[bytes], piece: bytes) -> int:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]
    return len(piece)


def _finish(file: IO[bytes], draft: Path, path: Path) -> None:
    os.fsync(file.fileno())
    draft.rename(path)
    sync(path.parent)


def _walk(root: Path, folder: Path) -> Iterator[BlobInfo]:
    """What is there, and away with what killed processes left."""
    for where, _, names in os.walk(folder):
        for name in names:
            path = Path(where, name)
            with contextlib.suppress(FileNotFoundError):  # it goes while we look
                found = path.stat()
                if not name.startswith(_DRAFT):
                    yield BlobInfo(str(path.relative_to(root)), found.st_size, found.st_mtime)
                elif time.time() - found.st_mtime > _STALE_SECONDS:
                    path.unlink()
