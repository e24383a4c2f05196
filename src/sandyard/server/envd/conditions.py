"""Range and If-* headers (RFC 9110 §13, §14) for one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime

from sandyard.guest.base import FileInfo

_RANGE = re.compile(rb"bytes=(\d{0,18})-(\d{0,18})")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` to `end`, both included."""

    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start + 1


def etag(info: FileInfo) -> bytes:
    return b'"%x-%x"' % (info.mtime_ns, info.size)


def last_modified(info: FileInfo) -> bytes:
    return formatdate(info.mtime_ns // 1_000_000_000, usegmt=True).encode()


def conditions(headers: Mapping[bytes, bytes], info: FileInfo) -> tuple[int, ByteRange | None]:
    """The status to answer with (200, 206, 304, 412, 416) and the range for 206."""
    tag, modified = etag(info), info.mtime_ns // 1_000_000_000
    if (value := headers.get(b"if-match")) is not None:
        if not _matches(value, tag):
            return 412, None
    elif (since := _date(headers.get(b"if-unmodified-since"))) is not None and modified > since:
        return 412, None
    if (value := headers.get(b"if-none-match")) is not None:
        if _matches(value, tag):
            return 304, None
    elif (since := _date(headers.get(b"if-modified-since"))) is not None and modified <= since:
        return 304, None
    if (value := headers.get(b"if-range")) is not None and value != tag and _date(value) != modified:
        return 200, None
    return _range(headers.get(b"range"), info.size)


def _range(value: bytes | None, size: int) -> tuple[int, ByteRange | None]:
    match = _RANGE.fullmatch(value.replace(b" ", b"")) if value is not None else None
    if match is None or match.groups() == (b"", b""):
        return 200, None  # none, several, or not understood: all of it, as the RFC allows
    first, last = match.groups()
    if not first:
        start, end = max(size - int(last), 0), size - 1
    else:
        start, end = int(first), min(int(last) if last else size - 1, size - 1)
    if start >= size or start > end:
        return 416, None
    return 206, ByteRange(start, end)


def _matches(value: bytes, tag: bytes) -> bool:
    return value.strip() == b"*" or tag in [part.strip().removeprefix(b"W/") for part in value.split(b",")]


def _date(value: bytes | None) -> int | None:
    if value is None:
        return None
    try:
        return int(parsedate_to_datetime(value.decode("latin-1")).timestamp())
    except (ValueError, OverflowError):
        return None
