"""Which pages of a process are its own: neither a file's nor never touched.

`scan` asks Linux 6.7 and later (PAGEMAP_SCAN of linux/fs.h), at a cost that follows what is there; `read` reads eight
bytes for every page, on any. Both say the same, also of pages that are swapped out or the kernel's page of zeros.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from io import FileIO

PAGE = 4096
Span = tuple[int, int]
"""Numbers of pages: the first, and the one behind the last."""

_ENTRY = 8  # bytes of a page when read, whose last has present (0x80), swapped (0x40), of a file (0x20)
_IS_OWN = bytes(1 if flags & 0xC0 and not flags & 0x20 else 0 for flags in range(256))

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_OWN = {"inverted": _IS_FILE, "mask": _IS_FILE, "anyof": _IS_PRESENT | _IS_SWAPPED, "return_mask": _IS_FILE}
_REGION = struct.Struct("<QQQ")  # struct page_region: start, end, categories
_REGIONS = 4096  # of one call
_ABSENT = (errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM)


class _Scan(ctypes.Structure):
    """`struct pm_scan_arg`: pages of which every category in `mask` (an `inverted` one: its absence) and one of
    `anyof` holds."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("walk_end", ctypes.c_uint64),
        ("vec", ctypes.c_uint64),
        ("vec_len", ctypes.c_uint64),
        ("max_pages", ctypes.c_uint64),
        ("inverted", ctypes.c_uint64),
        ("mask", ctypes.c_uint64),
        ("anyof", ctypes.c_uint64),
        ("return_mask", ctypes.c_uint64),
    ]


def own_pages(pid: int, start: int, size: int) -> Sequence[Span]:
    """Those of the `size` bytes from address `start`, numbered from there. Raises `OSError`, also where the process
    has ended."""
    with FileIO(f"/proc/{pid}/pagemap") as file:
        try:
            found = scan(file, start, size)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return read(file, start, size)
        # Of a process that ends it finds nothing, and says nothing.
        if len(os.pread(file.fileno(), _ENTRY, start // PAGE * _ENTRY)) != _ENTRY:
            raise _gone(file)
        return found


def scan(file: FileIO, start: int, size: int) -> Sequence[Span]:
    """Raises `OSError`, where the kernel has no such call one of ENOTTY."""
    regions = ctypes.create_string_buffer(_REGIONS * _REGION.size)
    found: list[Span] = []
    at, end = start, start + size
    while at < end:
        asked = _Scan(start=at, end=end, vec=ctypes.addressof(regions), vec_len=_REGIONS, **_OWN)
        asked.size = ctypes.sizeof(asked)
        count = fcntl.ioctl(file.fileno(), _PAGEMAP_SCAN, asked)
        for begin, last, _ in _REGION.iter_unpack(memoryview(regions)[: count * _REGION.size]):
            first, at = (begin - start) // PAGE, last
            if found and found[-1][1] == first:  # what one call ended with
                first = found.pop()[0]
            found.append((first, (last - start) // PAGE))
        # Where the last regions fitted, kernels say an end that is before them.
        at = max(at, asked.walk_end)
        if at == asked.start:
            raise _gone(file)
    return found


def read(file: FileIO, start: int, size: int) -> Sequence[Span]:
    """Raises `OSError`."""
    entries = os.pread(file.fileno(), size // PAGE * _ENTRY, start // PAGE * _ENTRY)
    if len(entries) != size // PAGE * _ENTRY:
        raise _gone(file)
    return list(_spans(entries[_ENTRY - 1 :: _ENTRY].translate(_IS_OWN)))


def _spans(marks: bytes) -> Iterator[Span]:
    end = 0
    while (first := marks.find(1, end)) >= 0:
        end = marks.find(0, first)
        end = len(marks) if end < 0 else end
        yield first, end


def _gone(file: FileIO) -> OSError:
    return OSError(f"{file.name} ended early: the process is gone")
