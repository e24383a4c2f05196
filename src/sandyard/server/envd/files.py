"""`/files`: download and upload, streaming, in bounded memory."""

from __future__ import annotations

import mimetypes
import posixpath
import zlib
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

from sandyard.errors import BadRequest, GuestError, GuestErrorCode
from sandyard.guest.base import FileInfo, FileType, UserInfo
from sandyard.server.envd.call import Aborted, Call
from sandyard.server.envd.conditions import ByteRange, conditions, etag, last_modified
from sandyard.server.envd.connect import Message
from sandyard.server.envd.metadata import metadata_of
from sandyard.server.envd.multipart import MultipartReader, boundary_of
from sandyard.server.web import body_chunks, respond, respond_error, respond_json

INFLATE_BYTES = 64 * 1024
CORS = (b"access-control-allow-origin", b"*")
# Files here are made up while they are read: what stat says of their size is not true.
_UNSIZED = ("/proc/", "/sys/", "/dev/")


async def download(call: Call, query: Mapping[str, str]) -> None:
    path = await call.guest.path(await _user(call, query), query.get("path", ""))
    try:
        info = await call.sandbox.agent.stat(path)
        if FileType.DIRECTORY in (info.type, info.target_type):
            await respond_error(call.send, 400, f"path '{path}' is a directory")
            return
        await _send_file(call, path, info)
    except GuestError as error:
        if call.started:
            raise Aborted from error
        await answer_guest_error(call, path, error)


async def upload(call: Call, query: Mapping[str, str]) -> None:
    user = await _user(call, query)
    metadata = metadata_of(call.headers)
    body = body_chunks(call.receive)
    encoding = call.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding == b"gzip":
        body = _inflate(body)
    elif encoding != b"identity":
        raise BadRequest(f"content-encoding {encoding.decode('latin-1')} is not supported", remedy="use gzip or none")
    boundary = boundary_of(call.headers.get(b"content-type", b""))
    path = query.get("path", "")
    if boundary is None:
        if not path:
            raise BadRequest("query parameter path is missing", field="path")
        written = [await _write(call, user, path, body, metadata)]
    else:
        written = []
        async for part in MultipartReader(boundary, body).parts():
            if part.name == "file":
                name = path or part.filename or ""
                if not name:
                    raise BadRequest("a file part has no filename and the query has no path", field="path")
                written.append(await _write(call, user, name, part.chunks(), metadata))
    await respond_json(call.send, 200, written, [CORS])


async def _write(
    call: Call, user: UserInfo, path: str, chunks: AsyncIterator[bytes], metadata: Mapping[str, str]
) -> Message:
    path = await call.guest.path(user, path)
    try:
        await call.sandbox.agent.write_file(path, chunks, user=user.name, metadata=metadata)
    except GuestError as error:
        raise FileFailure(path, error) from error
    written: Message = {"path": path, "name": posixpath.basename(path), "type": "file"}
    return written | {"metadata": metadata} if metadata else written


class FileFailure(Exception):
    """Writing a file failed inside the sandbox."""

    def __init__(self, path: str, error: GuestError) -> None:
        super().__init__(str(error))
        self.path = path
        self.error = error


async def _user(call: Call, query: Mapping[str, str]) -> UserInfo:
    return await call.guest.user(query.get("username") or call.user_name())


async def _send_file(call: Call, path: str, info: FileInfo) -> None:
    sized = info.type is FileType.FILE and not path.startswith(_UNSIZED)
    headers = [
        (b"content-type", (mimetypes.guess_type(path)[0] or "application/octet-stream").encode()),
        (b"content-disposition", b"inline; filename*=UTF-8''" + quote(info.name, errors="replace").encode()),
        CORS,
    ]
    wanted: ByteRange | None = None
    if sized:
        headers += [(b"last-modified", last_modified(info)), (b"etag", etag(info)), (b"accept-ranges", b"bytes")]
        status, wanted = conditions(call.headers, info)
        if status in (304, 412, 416):
            if status == 416:
                headers.append((b"content-range", b"bytes */%d" % info.size))
            await respond(call.send, status, headers=headers[1:])
            return
    gzip = wanted is None and _wants_gzip(call.headers)
    offset, length = (wanted.start, wanted.length) if wanted else (0, info.size if sized else None)
    chunks = call.sandbox.agent.read_file(path, offset, length)
    first = await anext(aiter(chunks), b"") if length != 0 else b""  # errors show before the status is sent
    if wanted:
        headers.append((b"content-range", b"bytes %d-%d/%d" % (wanted.start, wanted.end, info.size)))
    if gzip:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    elif length is not None:
        headers.append((b"content-length", b"%d" % length))
    call.started = True
    await call.send({"type": "http.response.start", "status": 206 if wanted else 200, "headers": headers})
    if gzip:
        await _send_deflated(call, first, chunks)
    else:
        await _send_plain(call, first, chunks, length)


async def _send_plain(call: Call, first: bytes, chunks: AsyncIterator[bytes], length: int | None) -> None:
    sent = len(first)
    if first:
        await call.write(first)
    if sent != length:
        async for chunk in chunks:
            sent += len(chunk)
            await call.write(chunk)
    if length is not None and sent != length:
        raise Aborted  # the file shrank while it was read: the client must not take this for all of it
    await call.finish()


async def _send_deflated(call: Call, first: bytes, chunks: AsyncIterator[bytes]) -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    if data := packer.compress(first):
        await call.write(data)
    async for chunk in chunks:
        if data := packer.compress(chunk):
            await call.write(data)
    await call.finish(packer.flush())


def _wants_gzip(headers: Mapping[bytes, bytes]) -> bool:
    """Whether gzip was asked for on purpose: HTTP libraries list every encoding they know by default."""
    names = {part.partition(b";")[0].strip() for part in headers.get(b"accept-encoding", b"").lower().split(b",")}
    return names == {b"gzip"}


async def _inflate(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    unpacker = zlib.decompressobj(31)
    try:
        async for chunk in chunks:
            while chunk:
                if data := unpacker.decompress(chunk, INFLATE_BYTES):
                    yield data
                chunk = unpacker.unconsumed_tail
        if data := unpacker.flush():
            yield data
    except zlib.error as error:
        raise BadRequest(f"body is not gzip: {error}") from error
    if not unpacker.eof:
        raise BadRequest("gzip body ends too early")


async def answer_guest_error(call: Call, path: str, error: GuestError) -> None:
    status, message = {
        GuestErrorCode.NOT_FOUND: (404, f"path '{path}' does not exist"),
        GuestErrorCode.IS_DIRECTORY: (400, f"path '{path}' is a directory"),
        GuestErrorCode.NO_SPACE: (507, f"not enough disk space to write '{path}'"),
        GuestErrorCode.PERMISSION: (403, f"path '{path}': permission denied"),
        GuestErrorCode.IO: (500, f"path '{path}': {error}"),
    }.get(error.code, (400, f"path '{path}': {error}"))
    await respond_error(call.send, status, message, [CORS])
