"""Blobs in S3-compatible storage, by obstore.

Each request is tried again with growing pauses while the storage is away or answers 5xx, until `timeout` seconds
have passed. Credentials come from the environment, as every S3 client reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import obstore
from obstore import exceptions
from obstore.store import S3Store

from sandyard.store.blobs.base import (
    BlobError,
    BlobFull,
    BlobInfo,
    BlobMissing,
    BlobRefused,
    BlobStore,
    BlobUnreachable,
    Content,
    check_key,
    check_prefix,
    check_range,
    pieces_of,
)

if TYPE_CHECKING:
    from obstore import BytesStream, GetOptions, GetResult
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig, S3Config

Credentials = Literal["environment", "instance", "none"]
_PIECE = 1 << 20
_PART = 8 << 20  # of an upload in parts; the smallest that S3 takes is 5 MiB
_RETRIES = 12
_RESUMED = 5
_FULL = ("507 ", "InsufficientStorage", "XMinioStorageFull", "QuotaExceeded")
_DENIED = ("403 ", "401 ", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")
_NO_BUCKET = "NoSuchBucket"


@dataclass(frozen=True, slots=True)
class Bucket:
    """`endpoint` None: AWS's own of `region`. `timeout` in seconds, of one request with its repetitions."""

    name: str
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    credentials: Credentials = "environment"
    timeout: float = 60.0


class S3Blobs(BlobStore):
    def __init__(self, bucket: Bucket) -> None:
        where = f"{bucket.endpoint}/{bucket.name}" if bucket.endpoint else f"s3://{bucket.name}"
        self.name = f"{where}/{bucket.prefix}".rstrip("/")
        self._timeout = bucket.timeout
        self._store = _open(bucket)

    async def put(self, key: str, content: Content) -> int:
        check_key(key)
        if isinstance(content, bytes):
            with self._named(key):
                async with asyncio.timeout(self._timeout):
                    await obstore.put_async(self._store, key, content, use_multipart=False)
            return len(content)
        counted = _Counted(content)
        with self._named(key, counted):
            await obstore.put_async(self._store, key, counted, use_multipart=True, chunk_size=_PART, max_concurrency=2)
        return counted.size

    async def stream(self, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        check_range(start, length)
        end: int | None = None
        if start or length is not None:
            known = await self.head(key)
            if known is None:
                raise BlobMissing(f"{self.name}: there is no {key}")
            end = known.size if length is None else min(known.size, start + length)
        failures, at = 0, start
        while end is None or at < end:
            try:
                found = await self._begin(key, at, end)
                end = found.meta["size"] if end is None else end
                pieces = found.stream(_PIECE)
                while piece := await self._next(key, pieces):
                    at, failures = at + len(piece), 0
                    yield piece
                if at < end:
                    raise BlobUnreachable(f"{self.name}: {key} ended at {at} of {end} bytes")
                return
            except BlobUnreachable:
                failures += 1
                if at == start or failures > _RESUMED:  # to begin was tried often enough by now
                    raise
                await asyncio.sleep(0.1 * 2**failures)

    async def head(self, key: str) -> BlobInfo | None:
        check_key(key)
        try:
            with self._named(key):
                async with asyncio.timeout(self._timeout):
                    found = await obstore.head_async(self._store, key)
        except BlobMissing:
            return None
        return BlobInfo(key, found["size"], found["last_modified"].timestamp())

    async def list(self, prefix: str) -> AsyncIterator[BlobInfo]:
        with self._named(check_prefix(prefix)):
            async for page in self._store.list(f"{prefix.rstrip('/')}/" if prefix else None):
                for each in page:
                    yield BlobInfo(each["path"], each["size"], each["last_modified"].timestamp())

    async def delete(self, key: str) -> None:
        with self._named(check_key(key)), contextlib.suppress(FileNotFoundError):
            async with asyncio.timeout(self._timeout):
                await obstore.delete_async(self._store, key)

    async def _begin(self, key: str, start: int, end: int | None) -> GetResult:
        with self._named(check_key(key)):
            async with asyncio.timeout(self._timeout):
                options: GetOptions = {} if end is None or start >= end else {"range": (start, end)}
                return await obstore.get_async(self._store, key, options=options)

    async def _next(self, key: str, pieces: BytesStream) -> bytes:
        """`b""` at the end."""
        with self._named(key):
            async with asyncio.timeout(self._timeout):
                async for piece in pieces:
                    return bytes(piece)
        return b""

    @contextlib.contextmanager
    def _named(self, key: str, source: _Counted | None = None) -> Iterator[None]:
        """The errors of obstore as ours; what the source of a stream raised is its own."""
        try:
            yield
        except TimeoutError as error:
            raise BlobUnreachable(f"{self.name}: {key} did not come within {self._timeout:g} s") from error
        except (exceptions.BaseError, OSError) as error:
            if source is not None and source.failure is not None:
                raise source.failure from error
            raise _of(f"{self.name}: {key}", error) from error


class _Counted:
    """A stream on its way, and what became of it."""

    def __init__(self, content: Content) -> None:
        self._pieces = pieces_of(content)
        self.size = 0
        self.failure: Exception | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self.failure = error
            raise
        self.size += len(piece)
        return piece


def _open(bucket: Bucket) -> S3Store:
    config: S3Config = {"region": bucket.region, "skip_signature": bucket.credentials == "none"}
    client: ClientConfig = {
        "allow_http": (bucket.endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=min(5.0, bucket.timeout)),
        "timeout": timedelta(seconds=bucket.timeout),
    }
    if bucket.endpoint:
        config |= {"endpoint": bucket.endpoint, "virtual_hosted_style_request": False}
    # Sooner than our own deadline, which could not say what the storage answered.
    longest = timedelta(seconds=min(5.0, bucket.timeout / 4))
    backoff: BackoffConfig = {"init_backoff": timedelta(milliseconds=100), "max_backoff": longest}
    retries: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=bucket.timeout / 2),
        "backoff": backoff | {"base": 2},
    }
    return S3Store(
        bucket.name, prefix=bucket.prefix or None, config=config, client_options=client, retry_config=retries
    )


def _of(where: str, error: Exception) -> BlobError:
    text = str(error).strip()
    line = text.splitlines()[0][:300] if text else type(error).__name__
    if _NO_BUCKET in text:
        return BlobRefused(f"{where}: there is no such bucket", remedy="make it, or correct blobs.url")
    if isinstance(error, FileNotFoundError):
        return BlobMissing(f"{where} is not there")
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return BlobRefused(f"{where}: {line}", remedy="see blobs.url and the AWS_* credentials in the environment")
    if any(mark in text for mark in _FULL):
        return BlobFull(f"{where}: {line}")
    if any(mark in text for mark in _DENIED):
        return BlobRefused(f"{where}: {line}", remedy="see blobs.url and the AWS_* credentials in the environment")
    return BlobUnreachable(f"{where}: {line}")
