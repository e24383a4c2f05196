"""What every blob storage must do: the twin in memory, a directory, and an S3 server on loopback."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.errors import BadRequest
from sandyard.store.blobs import BlobDamaged, BlobMissing, BlobStore
from sandyard.store.blobs.local import LocalBlobs
from sandyard.store.blobs.memory import MemoryBlobs
from tests.store.blobs.peers import bucket


@pytest.fixture(params=["memory", "local", "s3"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path, with_credentials: None) -> BlobStore:
    if request.param == "memory":
        return MemoryBlobs()
    if request.param == "local":
        return LocalBlobs(tmp_path / "blobs")
    return bucket(request.getfixturevalue("endpoint"), f"contract/{uuid.uuid4()}")


async def _keys(blobs: BlobStore, prefix: str) -> list[str]:
    return sorted([info.key async for info in blobs.list(prefix)])


async def test_what_was_put_is_there_whole_and_in_pieces(blobs: BlobStore) -> None:
    data = bytes(range(256)) * 9000
    assert await blobs.put("a/b.json", data) == len(data)
    assert await blobs.get("a/b.json") == data
    assert await blobs.get("a/b.json", 1000, 70000) == data[1000:71000]
    assert await blobs.get("a/b.json", 2_000_000) == data[2_000_000:]
    assert await blobs.get("a/b.json", len(data) - 3, 100) == data[-3:]
    assert await blobs.get("a/b.json", len(data)) == b""
    assert await blobs.get("a/b.json", len(data) + 5, 5) == b""
    assert await blobs.get("a/b.json", 5, 0) == b""


async def test_empty_objects_are_objects(blobs: BlobStore) -> None:
    await blobs.put("empty", b"")
    assert await blobs.get("empty") == b""
    found = await blobs.head("empty")
    assert found is not None
    assert found.size == 0


async def test_put_replaces(blobs: BlobStore) -> None:
    await blobs.put("k", b"one" * 1000)
    await blobs.put("k", b"two")
    assert await blobs.get("k") == b"two"
    assert await _keys(blobs, "") == ["k"]


async def test_head_knows_size_and_time(blobs: BlobStore) -> None:
    assert await blobs.head("x") is None
    await blobs.put("x", b"12345")
    found = await blobs.head("x")
    assert found is not None
    assert (found.key, found.size) == ("x", 5)
    assert abs(found.changed_at - time.time()) < 60


async def test_what_is_missing_is_said_by_name(blobs: BlobStore) -> None:
    with pytest.raises(BlobMissing, match="no/such"):
        await blobs.get("no/such")
    with pytest.raises(BlobMissing, match="no/such"):
        await blobs.get("no/such", 3, 4)


async def test_delete_is_idempotent(blobs: BlobStore) -> None:
    await blobs.put("x/y", b"1")
    await blobs.delete("x/y")
    await blobs.delete("x/y")
    assert await blobs.head("x/y") is None


async def test_list_is_by_folder(blobs: BlobStore) -> None:
    assert await _keys(blobs, "a") == []
    for key in ("a/1", "a/b/2", "ab/3", "c"):
        await blobs.put(key, key.encode())
    assert await _keys(blobs, "a") == ["a/1", "a/b/2"]
    assert await _keys(blobs, "a/") == ["a/1", "a/b/2"]
    assert await _keys(blobs, "") == ["a/1", "a/b/2", "ab/3", "c"]
    assert [info.size async for info in blobs.list("ab")] == [4]


async def _stream(pieces: int, failure: Exception | None = None) -> AsyncIterator[bytes]:
    for number in range(pieces):
        yield bytes([number]) * (1 << 20)
    if failure is not None:
        raise failure


async def test_streams_are_stored(blobs: BlobStore) -> None:
    assert await blobs.put("big", _stream(20)) == 20 << 20
    come = 0
    async for piece in blobs.stream("big"):
        assert piece[0] == come >> 20
        come += len(piece)
    assert come == 20 << 20


async def test_a_stream_that_fails_leaves_what_was_there(blobs: BlobStore) -> None:
    await blobs.put("k", b"before")
    for pieces in (2, 12):
        with pytest.raises(OSError, match="its disk is gone"):
            await blobs.put("k", _stream(pieces, OSError("its disk is gone")))
    assert await blobs.get("k") == b"before"
    with pytest.raises(ValueError, match="broken"):
        await blobs.put("new", _stream(2, ValueError("broken")))
    assert await _keys(blobs, "") == ["k"]


async def test_what_is_too_long_is_refused(blobs: BlobStore) -> None:
    await blobs.put("k", b"x" * 5000)
    with pytest.raises(BlobDamaged, match="more than the 4999 bytes"):
        await blobs.get("k", limit=4999)
    assert len(await blobs.get("k", limit=5000)) == 5000


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "ä", "a b", "a\0", "~x", "x" * 600])
async def test_bad_keys_are_refused(blobs: BlobStore, key: str) -> None:
    with pytest.raises(BadRequest, match="key"):
        await blobs.put(key, b"")
    with pytest.raises(BadRequest, match="key"):
        await blobs.head(key)
    with pytest.raises(BadRequest, match="key"):
        await blobs.get(key)
    with pytest.raises(BadRequest, match="key"):
        await blobs.delete(key)
