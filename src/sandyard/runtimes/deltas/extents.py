"""Where a file has data, and copies that keep its holes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from sandyard.runtimes.room import check_room

_FICLONE = 0x40049409
_CHUNK = 8 << 20


def extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of a file between holes."""
    at, end = 0, os.fstat(descriptor).st_size
    while at < end:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        hole = os.lseek(descriptor, at, os.SEEK_HOLE)
        yield at, hole
        at = hole


def copy(source: Path, target: Path, mode: int = 0o400, *, reserve: int = 0) -> None:
    """A new file: a clone where the file system has them, else a copy of what is not a hole. Raises `OSError`, and
    `SandboxError` where less than `reserve` bytes would stay free for others."""
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        os.fchmod(writer.fileno(), mode)
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return
        except OSError:  # this file system has no clones, or not between these two
            if reserve:
                needed = os.fstat(reader.fileno()).st_blocks * 512
                check_room(writer.fileno(), needed, f" of a copy of {source}", reserve=reserve)
            _copy_data(reader.fileno(), writer.fileno())


def _copy_data(reader: int, writer: int) -> None:
    os.ftruncate(writer, os.fstat(reader).st_size)
    for at, hole in extents(reader):
        while at < hole:
            done = os.copy_file_range(reader, writer, min(_CHUNK, hole - at), at, at)
            if done == 0:
                raise OSError(f"the image ended at {at} of {hole} bytes")
            at += done
