"""The parts of envd that are pure: framing, multipart, conditions, entries, signatures, queues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from e2b.sandbox.signature import get_signature
from hypothesis import given
from hypothesis import strategies as st

from sandyard.errors import BadRequest
from sandyard.guest.base import ExitStatus, FileInfo, FileType
from sandyard.server.envd.conditions import ByteRange, conditions, etag, last_modified
from sandyard.server.envd.connect import FRAME_LIMIT, RpcError, end_frame, frame, parse_frames
from sandyard.server.envd.entries import entry, permissions, timestamp
from sandyard.server.envd.multipart import MultipartReader, boundary_of
from sandyard.server.envd.sessions import QUEUE_BYTES, Subscriber, exit_frame
from sandyard.server.envd.signing import BadSignature, sign, verify

INFO = FileInfo("f", "/d/f", FileType.FILE, 100, 0o644, 0, 0, "root", "root", 1_700_000_000_123_456_789)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=4), st.data())
def test_frames_come_back_however_they_are_cut(messages: list[dict[str, str]], data: st.DataObject) -> None:
    wire = b"".join(frame(json.dumps(m).encode()) for m in messages)
    buffer, got = bytearray(), []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        buffer += wire[:size]
        wire = wire[size:]
        got += parse_frames(buffer)
    assert got == messages
    assert not buffer


def test_hostile_frames_are_refused() -> None:
    for wire in (b"\0" + (FRAME_LIMIT + 1).to_bytes(4, "big"), frame(b"{}", 1), frame(b"["), frame(b"[]")):
        with pytest.raises(RpcError):
            parse_frames(bytearray(wire))
    assert json.loads(end_frame(RpcError("not_found", 'no "x"'))[5:]) == {
        "error": {"code": "not_found", "message": 'no "x"'}
    }


async def _read(body: bytes, cuts: list[int]) -> list[tuple[str, str | None, bytes]]:
    async def chunks() -> AsyncIterator[bytes]:
        start = 0
        for cut in [*cuts, len(body)]:
            if cut > start:
                yield body[start:cut]
                start = cut

    found = []
    async for part in MultipartReader(b"XX", chunks()).parts():
        content = b"".join([chunk async for chunk in part.chunks()])
        found.append((part.name, part.filename, content))
    return found


@given(
    st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"\r\n--X", b"\r\n", b"--XX", b"\r\n--XY"])), max_size=4
    ),
    st.lists(st.integers(0, 600), max_size=8),
)
def test_multipart_parts_come_back_however_they_are_cut(contents: list[bytes], cuts: list[int]) -> None:
    contents = [c for c in contents if b"\r\n--XX" not in b"\r\n" + c]
    body = b"preamble" if len(cuts) % 2 else b""
    for i, content in enumerate(contents):
        head = f'Content-Disposition: form-data; name="file"; filename="/tmp/f {i}"\r\n'.encode()
        body += b"\r\n--XX\r\n" + head + b"Content-Type: application/octet-stream\r\n\r\n" + content
    body += b"\r\n--XX--\r\nepilogue"
    if not len(cuts) % 2:
        body = body[2:]
    got = asyncio.run(_read(body, sorted(cuts)))
    assert got == [("file", f"/tmp/f {i}", content) for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    "body", [b"", b"--XX", b"--XX\r\nno end of headers", b"--XXjunk\r\n", b"--XX\r\nA: b\r\n\r\nhalf"]
)
async def test_truncated_or_wrong_multipart_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="multipart"):
        await _read(body, [])


async def test_endless_part_headers_are_refused() -> None:
    with pytest.raises(BadRequest, match="headers"):
        await _read(b"--XX\r\n" + b"A: b\r\n" * 10_000, list(range(0, 60_000, 1000)))


def test_boundaries() -> None:
    assert boundary_of(b'multipart/form-data; boundary="a b"') == b"a b"
    assert boundary_of(b"multipart/form-data; boundary=xyz") == b"xyz"
    assert boundary_of(b"multipart/form-data") is None
    assert boundary_of(b"application/octet-stream; boundary=x") is None


@pytest.mark.parametrize(
    ("value", "status", "wanted"),
    [
        (b"bytes=0-9", 206, ByteRange(0, 9)),
        (b"bytes=90-", 206, ByteRange(90, 99)),
        (b"bytes=-10", 206, ByteRange(90, 99)),
        (b"bytes=-1000", 206, ByteRange(0, 99)),
        (b"bytes=50-1000", 206, ByteRange(50, 99)),
        (b"bytes=100-", 416, None),
        (b"bytes=9-5", 416, None),
        (b"bytes=-", 200, None),
        (b"bytes=0-1,5-6", 200, None),
        (b"lines=1-2", 200, None),
    ],
)
def test_ranges(value: bytes, status: int, wanted: ByteRange | None) -> None:
    assert conditions({b"range": value}, INFO) == (status, wanted)


def test_conditional_headers() -> None:
    tag, modified = etag(INFO), last_modified(INFO)
    assert conditions({b"if-none-match": tag}, INFO)[0] == 304
    assert conditions({b"if-none-match": b'"other"'}, INFO)[0] == 200
    assert conditions({b"if-modified-since": modified}, INFO)[0] == 304
    assert conditions({b"if-modified-since": b"Mon, 01 Jan 2001 00:00:00 GMT"}, INFO)[0] == 200
    assert conditions({b"if-unmodified-since": b"Mon, 01 Jan 2001 00:00:00 GMT"}, INFO)[0] == 412
    assert conditions({b"if-match": b'"other"'}, INFO)[0] == 412
    assert conditions({b"if-match": b"*"}, INFO)[0] == 200
    assert conditions({b"range": b"bytes=0-1", b"if-range": b'"other"'}, INFO)[0] == 200
    assert conditions({b"range": b"bytes=0-1", b"if-range": tag}, INFO)[0] == 206
    assert conditions({b"if-modified-since": b"nonsense"}, INFO)[0] == 200


def test_entries_look_as_go_prints_them() -> None:
    assert permissions(FileType.FILE, 0o644) == "-rw-r--r--"
    assert permissions(FileType.DIRECTORY, 0o1777) == "dtrwxrwxrwx"
    assert permissions(FileType.SYMLINK, 0o777) == "Lrwxrwxrwx"
    assert permissions(FileType.FILE, 0o4755) == "urwxr-xr-x"
    assert timestamp(1_700_000_000_123_456_789) == "2023-11-14T22:13:20.123456789Z"
    link = FileInfo("l", "/d/l", FileType.SYMLINK, 4, 0o777, 0, 0, "root", "root", 0, "../f", FileType.DIRECTORY, 0o755)
    shown = entry(link)
    assert (shown["type"], shown["mode"], shown["symlinkTarget"]) == ("FILE_TYPE_DIRECTORY", 0o755, "/f")


def test_exits_are_told_as_e2b_tells_them() -> None:
    def end(status: ExitStatus) -> object:
        return json.loads(exit_frame(status)[5:])["event"]["end"]

    assert end(ExitStatus(code=0)) == {"exitCode": 0, "exited": True, "status": "exit status 0"}
    assert end(ExitStatus(code=3)) == {
        "exitCode": 3,
        "exited": True,
        "status": "exit status 3",
        "error": "exit status 3",
    }
    assert end(ExitStatus(signal=9)) == {
        "exitCode": -1,
        "exited": False,
        "status": "signal: killed",
        "error": "signal: killed",
    }


@pytest.mark.parametrize(("user", "seconds"), [(None, None), ("root", None), ("user", 100)])
def test_signatures_are_those_of_the_sdk(user: str | None, seconds: int | None) -> None:
    theirs = get_signature("/tmp/x", "read", user, "token", seconds)
    query = {"path": "/tmp/x", "signature": theirs["signature"]}
    if user:
        query["username"] = user
    if theirs["expiration"]:
        query["signature_expiration"] = str(theirs["expiration"])
    verify(query, "read", "token")
    for change in ({"path": "/tmp/y"}, {"username": "other"}, {"signature_expiration": "99999999999"}):
        with pytest.raises(BadSignature, match="invalid"):
            verify({**query, **change}, "read", "token")
    with pytest.raises(BadSignature, match="invalid"):
        verify(query, "write", "token")


def test_expired_and_missing_signatures_say_so() -> None:
    old = sign("/x", "read", "", "token", 1000)
    with pytest.raises(BadSignature, match="already expired"):
        verify({"path": "/x", "signature": old, "signature_expiration": "1000"}, "read", "token")
    with pytest.raises(BadSignature, match="missing"):
        verify({"path": "/x"}, "read", "token")


async def test_a_queue_fills_drains_and_ends_in_order() -> None:
    queue = Subscriber()
    queue.push(b"a" * QUEUE_BYTES)
    assert queue.full
    assert not await queue.room(0.01)
    waiting = asyncio.create_task(queue.room(5))
    await asyncio.sleep(0)
    queue.push(b"b")
    queue.finish(b"end")
    queue.push(b"too late")
    assert await queue.next() == (b"a" * QUEUE_BYTES + b"b" + b"end", True)
    assert await waiting


async def test_a_closed_queue_lets_its_writer_go() -> None:
    queue = Subscriber()
    queue.push(b"a" * QUEUE_BYTES)
    waiting = asyncio.create_task(queue.room(5))
    await asyncio.sleep(0)
    queue.close()
    assert await asyncio.wait_for(waiting, 1)
    assert await queue.next() == (b"", True)
