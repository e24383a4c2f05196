"""A storage that drops, stalls, refuses or is full; and a directory that dies at any byte."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.config import BlobSettings
from sandyard.errors import ConfigError
from sandyard.store.blobs import BlobError, BlobFull, BlobRefused, BlobUnreachable, open_blobs
from sandyard.store.blobs.local import LocalBlobs
from tests.store.blobs.peers import BadLink, bad_link, bucket, free_port

pytestmark = pytest.mark.usefixtures("with_credentials")
DATA = os.urandom(3 << 20)


@pytest.fixture
async def link(endpoint: str) -> AsyncIterator[BadLink]:
    async with bad_link(endpoint) as state:
        yield state


async def test_errors_that_pass_are_tried_again(link: BadLink) -> None:
    blobs = bucket(link.endpoint, str(uuid.uuid4()))
    link.answers = [(503, "SlowDown"), (500, "InternalError")]
    await blobs.put("a", DATA)
    link.answers = [(503, "SlowDown")]
    assert await blobs.get("a") == DATA
    link.answers = [(502, "BadGateway")]
    assert await blobs.head("a") is not None


async def test_dropped_connections_are_taken_up_again(link: BadLink) -> None:
    blobs = bucket(link.endpoint, str(uuid.uuid4()))
    link.cut_after = [-100_000, -5]
    await blobs.put("a", DATA)
    link.cut_after = [1_500_000, 20, 900_000]
    assert await blobs.get("a") == DATA
    link.cut_after = [200_000]
    assert await blobs.get("a", 1000, 2_000_000) == DATA[1000:2_001_000]


async def test_one_that_stays_away_is_given_up_in_time(link: BadLink) -> None:
    link.always = (503, "SlowDown")
    blobs = bucket(link.endpoint, timeout=1.5)
    began = time.monotonic()
    with pytest.raises(BlobUnreachable, match=link.endpoint):
        await blobs.put("a", b"1")
    assert time.monotonic() - began < 8
    gone = bucket(f"http://127.0.0.1:{free_port()}", timeout=1.0)
    with pytest.raises(BlobUnreachable):
        await gone.get("a")
    with pytest.raises(BlobUnreachable):
        _ = [info async for info in gone.list("")]


async def test_one_that_is_too_slow_is_given_up(link: BadLink) -> None:
    link.delay = 30
    blobs = bucket(link.endpoint, timeout=0.5)
    for work in (blobs.put("a", b"1"), blobs.head("a"), blobs.get("a"), blobs.delete("a")):
        with pytest.raises(BlobUnreachable):
            await asyncio.wait_for(work, 10)


async def test_slow_but_alive_is_fine(link: BadLink) -> None:
    link.delay = 0.3
    blobs = bucket(link.endpoint, str(uuid.uuid4()), timeout=5)
    await blobs.put("a", DATA)
    assert await blobs.get("a") == DATA


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
async def test_one_that_denies_is_not_asked_twice(link: BadLink, code: str) -> None:
    link.always = (403, code)
    blobs = bucket(link.endpoint)
    with pytest.raises(BlobRefused, match="credentials"):
        await blobs.put("a", b"1")
    with pytest.raises(BlobRefused):
        await blobs.get("a")
    with pytest.raises(BlobRefused):
        await blobs.head("a")
    assert link.connections == 3


async def test_a_bucket_that_is_not_there_is_said(link: BadLink) -> None:
    link.always = (404, "NoSuchBucket")
    with pytest.raises(BlobRefused, match="no such bucket"):
        await bucket(link.endpoint).put("a", b"1")


async def test_a_full_one_is_said(link: BadLink) -> None:
    link.always = (507, "InsufficientStorage")
    with pytest.raises(BlobFull):
        await bucket(link.endpoint, timeout=1.0).put("a", b"1")


async def test_a_directory_that_is_full_or_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(tmp_path / "b")
    await blobs.put("x/a", b"old")

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(BlobFull, match="No space left"):
            await blobs.put("x/a", b"new")
    assert await blobs.get("x/a") == b"old"
    assert [path.name for path in (tmp_path / "b" / "x").iterdir()] == ["a"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError):
        await LocalBlobs(tmp_path / "file").put("a", b"1")


async def test_what_a_killed_process_left_is_not_listed_and_goes(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path)
    await blobs.put("x/a", b"1")
    draft = tmp_path / "x" / "~draft-0"
    draft.write_bytes(b"half")
    assert [info.key async for info in blobs.list("")] == ["x/a"]
    assert draft.exists()
    os.utime(draft, (1, 1))
    assert [info.key async for info in blobs.list("x")] == ["x/a"]
    assert not draft.exists()


def test_settings_choose_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_blobs(BlobSettings()) is None
    found = open_blobs(BlobSettings(url=f"file://{tmp_path}"))
    assert found is not None
    assert found.name == str(tmp_path)
    found = open_blobs(BlobSettings(url="s3://some-bucket/a/b", endpoint="http://127.0.0.1:1"))
    assert found is not None
    assert found.name == "http://127.0.0.1:1/some-bucket/a/b"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID"):
        open_blobs(BlobSettings(url="s3://some-bucket"))
