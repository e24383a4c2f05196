"""One file that holds the blocks of an image which differ from its parent's.

Layout, integers little-endian: the data of the runs, each at a multiple of 4096; the index, one entry a run
(u64 first block, u32 blocks, u32 zero, u64 offset, 16 bytes digest); the footer of 160 bytes. A run is up to
1 MiB of neighbouring blocks; one that is all zero has no data. Digests are BLAKE2b of 128 bits (RFC 7693): a
run's of its data, the footer's of the index and of the footer before it, so that a damaged file is known as one.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple

from sandyard.errors import SandboxError
from sandyard.runtimes.durable import sync

Block = tuple[int, "bytes | bytearray | memoryview"]

PARTIAL = ".part"  # behind the name of what is not whole yet
_MAGIC = b"SYDELTA\x01"
_ALIGN = 4096
RUN_BYTES = 1 << 20
_ENTRY = struct.Struct("<QIIQ16s")
_FOOTER = struct.Struct("<8sIIQQQ104s16s")
_DIGEST = 16
_PARENT = 104  # bytes of a parent's name
_NO_DIGEST = bytes(_DIGEST)
_PUNCH = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class DeltaDamaged(SandboxError):
    """A delta is not what was written: cut, changed, or no delta at all."""


class Run(NamedTuple):
    """`blocks` of them from number `first`; `offset` of their data in the file, None: they are zero."""

    first: int
    blocks: int
    offset: int | None
    digest: bytes

    @property
    def end(self) -> int:
        return self.first + self.blocks


class Placed(NamedTuple):
    """Blocks from number `first` that lie in a file already, at `offset`: a multiple of 4096; at most 1 MiB."""

    first: int
    offset: int
    data: bytes


class Delta:
    """A delta as a file, open for reading. The footer and the index are checked at once, each run when it is read."""

    def __init__(self, path: Path) -> None:
        """Raises `DeltaDamaged`, and `OSError` where it cannot be read."""
        self.path = path
        self._file = FileIO(path)
        try:
            self.block_size, self.size, self.parent, self.runs, self.digest = _read_index(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Delta:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def data_bytes(self) -> int:
        """Of the blocks that are not zero."""
        return sum(run.blocks for run in self.runs if run.offset is not None) * self.block_size

    def read(self, run: Run) -> bytes:
        """A run's bytes, checked. Raises `DeltaDamaged`."""
        length = run.blocks * self.block_size
        if run.offset is None:
            return bytes(length)
        data = os.pread(self._file.fileno(), length, run.offset)
        if len(data) != length or _digest(data) != run.digest:
            raise DeltaDamaged(f"{self.path}: blocks {run.first} to {run.end - 1} are not what was written")
        return data

    def peek(self, run: Run, first: int, end: int) -> bytes:
        """Blocks `first` to `end`, exclusive, of a run, which is not read whole for them: nothing says that they are
        what was written. Raises `DeltaDamaged` where the file is cut."""
        length = (end - first) * self.block_size
        if run.offset is None:
            return bytes(length)
        data = os.pread(self._file.fileno(), length, run.offset + (first - run.first) * self.block_size)
        if len(data) != length:
            raise DeltaDamaged(f"{self.path} is cut")
        return data

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Every block by number, ascending. Raises `DeltaDamaged`."""
        for run in self.runs:
            data = memoryview(self.read(run))
            for number in range(run.blocks):
                yield run.first + number, data[number * self.block_size : (number + 1) * self.block_size]

    def verify(self) -> None:
        """Read everything. Raises `DeltaDamaged`."""
        for run in self.runs:
            self.read(run)


def parent_name(path: Path) -> str:
    """Whose difference the delta `path` is, of a delta whose index is whole: quick, however many runs it has.

    Raises `DeltaDamaged`, and `OSError` where it cannot be read."""
    with FileIO(path) as file:
        return _read_checked(file, path).parent


def write_delta(path: Path, blocks: Iterable[Block], *, block_size: int, size: int, parent: str, durable: bool) -> int:
    """Write the new file `path` of `blocks`, in ascending order, of an image of `size` bytes; returns its bytes on
    the host's disk. `parent` names what the other blocks are those of. Atomic: on failure nothing is left.

    The last block of an image whose size is no multiple of `block_size` is filled up with zeros. Raises
    `ValueError` for blocks out of order, out of the image or of another size, and `OSError`."""
    runs = _runs(blocks, block_size, size)
    return write_runs(path, runs, block_size=block_size, size=size, parent=parent, durable=durable)


def write_runs(
    path: Path,
    runs: Iterable[tuple[int, bytes | bytearray]],
    *,
    block_size: int,
    size: int,
    parent: str,
    durable: bool,
) -> int:
    """`write_delta` of blocks that are runs already: ascending, of up to `RUN_BYTES`, zero ones apart from others."""
    name = _parent_field(parent)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "xb") as file:
            os.fchmod(file.fileno(), 0o400)
            index = b"".join(_write_runs(file, runs, block_size))
            _write_end(file, index, name, block_size, size, durable)
        taken = partial.stat().st_blocks * 512
        os.link(partial, path)  # unlike a rename, it does not replace
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync(path.parent)
    return taken


def index_delta(
    draft: Path, path: Path, runs: Iterable[Placed], *, block_size: int, size: int, parent: str, durable: bool
) -> None:
    """Make the file `draft`, which has the data already, the new delta `path`: `runs`, in ascending order, say what
    lies where. What none of them names, and what is zero, becomes a hole, so that whoever has mapped that still sees
    the same of the latter. `draft` is gone afterwards, also on failure.

    Raises `ValueError` for runs that a delta cannot have, and `OSError`."""
    name = _parent_field(parent)
    try:
        with open(draft, "r+b") as file:
            os.fchmod(file.fileno(), 0o400)
            end = file.seek(0, os.SEEK_END)
            entries, kept, last = [], 0, 0
            for placed in runs:
                if placed.first < last or placed.offset % _ALIGN or len(placed.data) > RUN_BYTES:
                    raise ValueError(f"block {placed.first} at {placed.offset} of {draft}, behind block {last}")
                last = placed.first + len(placed.data) // block_size
                for run in _by_kind(placed, block_size):
                    entries.append(_entry(run.first, run.data, run.offset, block_size))
                    if not _is_zero(run.data):
                        _punch(file, kept, run.offset - kept)
                        kept = run.offset + len(run.data)
            _punch(file, kept, end - kept)
            file.seek(-(-end // _ALIGN) * _ALIGN)
            _write_end(file, b"".join(entries), name, block_size, size, durable)
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def _by_kind(placed: Placed, block_size: int) -> Iterator[Placed]:
    """Its parts that are zero apart from those that are not."""
    zero, data = bytes(block_size), placed.data
    begin, kind = 0, data[:block_size] == zero
    for at in range(block_size, len(data) + 1, block_size):
        if at == len(data) or (data[at : at + block_size] == zero) != kind:
            yield Placed(placed.first + begin // block_size, placed.offset + begin, data[begin:at])
            begin, kind = at, not kind


def _punch(file: IO[bytes], offset: int, length: int) -> None:
    """Give the disk back what lies there, where the file system can."""
    if length > 0 and _libc.fallocate(file.fileno(), _PUNCH, offset, length):
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:
            raise OSError(code, os.strerror(code), file.name)


def _parent_field(parent: str) -> bytes:
    name = parent.encode()
    if len(name) > _PARENT or not name:
        raise ValueError(f"parent {parent!r} is not 1 to {_PARENT} bytes")
    return name.ljust(_PARENT, b"\0")


def _write_end(file: IO[bytes], index: bytes, parent: bytes, block_size: int, size: int, durable: bool) -> None:
    """The index and the footer, at the file's position."""
    count, at = len(index) // _ENTRY.size, file.tell()
    footer = _FOOTER.pack(_MAGIC, block_size, count, size, at, 0, parent, b"")[:-_DIGEST]
    file.write(index + footer + _digest(index + footer))
    file.flush()
    if durable:
        os.fsync(file.fileno())


def _runs(blocks: Iterable[Block], block_size: int, size: int) -> Iterator[tuple[int, bytearray]]:
    """Neighbouring blocks together, up to the bytes of a run; those that are zero apart from those that are not."""
    zero = bytes(block_size)
    first, kind, pending, last = 0, False, bytearray(), -1
    for number, data in blocks:
        if len(data) != block_size or number <= last or number * block_size >= size:
            raise ValueError(f"block {number} of {len(data)} bytes behind block {last}, in an image of {size} bytes")
        is_zero = data == zero
        if pending and (number != last + 1 or is_zero != kind or len(pending) >= RUN_BYTES):
            yield first, pending
            pending = bytearray()
        if not pending:
            first, kind = number, is_zero
        pending += data
        last = number
    if pending:
        yield first, pending


def _write_runs(file: IO[bytes], runs: Iterable[tuple[int, bytes | bytearray]], block_size: int) -> Iterator[bytes]:
    """Write the data, and return the entries of the index."""
    for first, data in runs:
        yield _entry(first, data, file.tell(), block_size)
        if not _is_zero(data):
            file.write(data)
            file.write(bytes(-len(data) % _ALIGN))


def _entry(first: int, data: bytes | bytearray, offset: int, block_size: int) -> bytes:
    if _is_zero(data):
        return _ENTRY.pack(first, len(data) // block_size, 1, 0, _NO_DIGEST)
    return _ENTRY.pack(first, len(data) // block_size, 0, offset, _digest(data))


class _Index(NamedTuple):
    """What the footer says, and the entries of the index."""

    block_size: int
    size: int
    parent: str
    entries: bytes
    digest: bytes


def _read_checked(file: FileIO, path: Path) -> _Index:
    end = os.fstat(file.fileno()).st_size
    footer = os.pread(file.fileno(), _FOOTER.size, max(0, end - _FOOTER.size))
    if len(footer) != _FOOTER.size or not footer.startswith(_MAGIC):
        raise DeltaDamaged(f"{path} is not a whole delta")
    _, block_size, count, size, at, _, parent, digest = _FOOTER.unpack(footer)
    if at + count * _ENTRY.size + _FOOTER.size != end:
        raise DeltaDamaged(f"{path} is cut, or has more than was written")
    index = os.pread(file.fileno(), count * _ENTRY.size, at)
    if _digest(index + footer[:-_DIGEST]) != digest:
        raise DeltaDamaged(f"{path}: its index is not what was written")
    return _Index(block_size, size, parent.rstrip(b"\0").decode(), index, digest)


def _read_index(file: FileIO, path: Path) -> tuple[int, int, str, Sequence[Run], bytes]:
    found = _read_checked(file, path)
    runs = [
        Run(first, blocks, None if zero else offset, digest)
        for first, blocks, zero, offset, digest in _ENTRY.iter_unpack(found.entries)
    ]
    return found.block_size, found.size, found.parent, runs, found.digest


def _is_zero(data: bytes | bytearray) -> bool:
    return data == bytes(len(data))  # compared at once, where `any` looks at each byte


def _digest(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
