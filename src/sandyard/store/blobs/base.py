"""The contract of blob storage: whole objects under names, written once or replaced, never changed in part.

`local.py` keeps them as files, `s3.py` in S3-compatible storage, `memory.py` is the in-memory twin.
`tests/store/blobs/test_contract.py` holds each of them to it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from sandyard.errors import BadRequest, SandboxError

_KEY = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_KEY_LIMIT = 512

Content = bytes | AsyncIterable[bytes]


class BlobError(SandboxError):
    """Something about the storage of blobs; the message names the storage and the key."""

    http_status = 502


class BlobMissing(BlobError):
    """There is no such object."""


class BlobRefused(BlobError):
    """The storage knows us and says no, or does not know us."""


class BlobFull(BlobError):
    """There is no room for it."""


class BlobUnreachable(BlobError):
    """The storage did not answer, or not in time, however often it was asked."""

    http_status = 503


class BlobDamaged(BlobError):
    """An object is not what was stored under its name."""


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """`changed_at` in seconds since the epoch, by the storage's own clock."""

    key: str
    size: int
    changed_at: float


class BlobStore(ABC):
    """Keys are parts of `[A-Za-z0-9._-]` between slashes; a bad one is a `BadRequest`. What was put is seen by
    every later call, of any process. Every method may raise `BlobRefused` and `BlobUnreachable`; failures that
    pass are tried again until the storage's deadline. For any number of tasks of one event loop."""

    name: str
    """For people: where it is, without credentials."""

    @abstractmethod
    async def put(self, key: str, content: Content) -> int:
        """Store an object, or replace it; its bytes. Atomic: others see the one before or this one, whole.

        A stream is not held in memory; what it raises is passed on. Raises `BlobFull`."""

    @abstractmethod
    def stream(self, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """An object from byte `start` on, in pieces of any size; nothing where it is shorter.

        Raises `BlobMissing`."""

    @abstractmethod
    async def head(self, key: str) -> BlobInfo | None:
        """What is known of an object; None where there is none."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        """Every object below the folder `prefix` (`""`: all), in no order."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Idempotent."""

    async def get(self, key: str, start: int = 0, length: int | None = None, *, limit: int = 64 << 20) -> bytes:
        """An object, or a piece of it. Raises `BlobMissing`, and `BlobDamaged` for one of more than `limit` bytes."""
        pieces: list[bytes] = []
        left = limit
        async for piece in self.stream(key, start, length):
            left -= len(piece)
            if left < 0:
                raise BlobDamaged(f"{self.name}: {key} has more than the {limit} bytes it may have")
            pieces.append(piece)
        return b"".join(pieces)


def check_key(key: str) -> str:
    """Raises `BadRequest`."""
    if len(key) > _KEY_LIMIT or not _KEY.fullmatch(key):
        raise BadRequest(f"key {key[:80]!r}: use A-Z, a-z, 0-9, '.', '_' and '-' between slashes", field="key")
    return key


def check_prefix(prefix: str) -> str:
    """A folder's name, without a slash at its end. Raises `BadRequest`."""
    return check_key(prefix.rstrip("/")) if prefix else ""


def check_range(start: int, length: int | None) -> None:
    """Raises `BadRequest`."""
    if start < 0 or (length is not None and length < 0):
        raise BadRequest(f"range: {start} and {length} are not both 0 or more", field="start")


async def pieces_of(content: Content) -> AsyncIterator[bytes]:
    """What is to be stored, one piece after the other."""
    if isinstance(content, bytes):
        yield content
        return
    async for piece in content:
        yield piece
