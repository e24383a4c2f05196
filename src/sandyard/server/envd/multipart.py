"""Streaming `multipart/form-data`: file parts one after the other, in bounded memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message as MimeHeaders
from email.parser import BytesHeaderParser

from sandyard.errors import BadRequest

HEADER_LIMIT = 16 * 1024
PART_LIMIT = 10_000


def boundary_of(content_type: bytes) -> bytes | None:
    """The boundary of a multipart content type, None for any other type."""
    headers = MimeHeaders()
    headers["content-type"] = content_type.decode("latin-1")
    boundary = headers.get_boundary()
    if headers.get_content_type() != "multipart/form-data" or not boundary:
        return None
    return boundary.encode("utf-8", "surrogateescape")


class Part:
    """One part. `chunks` must be read to its end before the next part is asked for."""

    def __init__(self, headers: MimeHeaders, reader: MultipartReader) -> None:
        self.name = str(headers.get_param("name", "", header="content-disposition"))
        self.filename = headers.get_filename()
        self._reader = reader

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in self._reader.part_chunks():
            yield chunk


class MultipartReader:
    """Raises `BadRequest` for a body that is not what its content type says."""

    def __init__(self, boundary: bytes, chunks: AsyncIterator[bytes]) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._chunks = chunks
        self._buffer = bytearray(b"\r\n")  # the first delimiter may come without a line break before it
        self._in_part = False

    async def parts(self) -> AsyncIterator[Part]:
        await self._skip_to_delimiter()
        count = 0
        while not await self._at_end():
            count += 1
            if count > PART_LIMIT:
                raise BadRequest(f"multipart body: more than {PART_LIMIT} parts", remedy="use several requests")
            yield Part(await self._headers(), self)
            async for _ in self.part_chunks():
                pass  # whatever the consumer left unread

    async def part_chunks(self) -> AsyncIterator[bytes]:
        keep = len(self._delimiter) - 1
        while self._in_part:
            found = self._buffer.find(self._delimiter)
            size = found if found >= 0 else len(self._buffer) - keep
            if size > 0:
                chunk = bytes(memoryview(self._buffer)[:size])
                del self._buffer[:size]
                yield chunk
            if found >= 0:
                del self._buffer[: len(self._delimiter)]
                self._in_part = False
            else:
                await self._more()

    async def _skip_to_delimiter(self) -> None:
        self._in_part = True
        async for _ in self.part_chunks():
            pass

    async def _at_end(self) -> bool:
        """After a delimiter: `--` ends the body, a line break begins a part."""
        while len(self._buffer) < 2:
            await self._more()
        mark = bytes(self._buffer[:2])
        if mark == b"--":
            return True
        if mark != b"\r\n":
            raise BadRequest("multipart body: a boundary is not followed by a line break")
        return False

    async def _headers(self) -> MimeHeaders:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEADER_LIMIT:
                raise BadRequest(f"multipart body: the headers of a part pass {HEADER_LIMIT} bytes")
            await self._more()
        headers = BytesHeaderParser().parsebytes(bytes(self._buffer[2 : end + 2]))
        del self._buffer[: end + 4]
        self._in_part = True
        return headers

    async def _more(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is not None:
            self._buffer += chunk
            return
        raise BadRequest("multipart body ends before its last boundary")
