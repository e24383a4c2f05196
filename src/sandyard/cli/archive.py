"""Trees of files as tar archives that keep modes, symlinks, hard links and holes.

Written: pax archives; a file with holes in GNU's sparse format 1.0 (GNU tar's manual, "Storing Sparse
Files"), which GNU tar reads. Read: what GNU and busybox tar write. What is read comes from a machine
that is not trusted: every name stays below the target, and nothing is written through a link, because
links are made after all else.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from sandyard.errors import SandyardError

_BLOCK = 512
_CHUNK = 1 << 20
_Extents = list[tuple[int, int]]


class ArchiveError(SandyardError, ValueError):
    """The archive holds what must not be unpacked. The message names the member."""


def pack(source: Path, name: str, target: IO[bytes], *, sparse: bool = True) -> int:
    """Write `source` (a file, a symlink or a tree) under `name`; returns how many members were written.

    Sockets, pipes and devices are left out. `sparse` False: holes are written as zeros. Raises `OSError`."""
    count = 0
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, inner in _walk(source, PurePosixPath(name)):
            info = archive.gettarinfo(path, str(inner))
            if info is None or not (info.isfile() or info.isdir() or info.issym() or info.islnk()):
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            count += 1
            if info.isfile():
                _add_file(archive, info, path, sparse=sparse)
            else:
                archive.addfile(info)
    return count


def unpack(source: IO[bytes], name: str, target: Path) -> int:
    """Make `target` from the member `name` of a seekable archive and what lies below it; returns the count of members.

    `target` must not exist. Owners are this user's, and no file becomes setuid. Raises `ArchiveError` and
    `OSError`; then a part may be there."""
    try:
        return _unpack(source, name, target)
    except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
        raise error if isinstance(error, ArchiveError) else ArchiveError(f"the archive is damaged: {error}") from error


def extents(file: IO[bytes], size: int) -> _Extents:
    """(offset, length) of what is no hole. A file system that knows none has one extent."""
    found: _Extents = []
    at = 0
    while at < size:
        try:
            start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
        except OSError:  # nothing but a hole is left
            break
        found.append((start, end - start))
        at = end
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return found


def _unpack(source: IO[bytes], name: str, target: Path) -> int:
    with tarfile.open(fileobj=source, mode="r:") as archive:
        members = [(member, _inner(member, name)) for member in archive]
        if not members:
            raise ArchiveError("the archive is damaged: nothing is in it")
        for member, inner in members:
            _make(archive, member, _below(target, inner))
        for member, inner in members:
            if member.islnk():
                os.link(_below(target, _relative(member.linkname, name)), _below(target, inner), follow_symlinks=False)
        for member, inner in members:
            if member.issym():
                os.symlink(member.linkname, _below(target, inner))
        for member, inner in reversed(members):
            if member.isdir():
                path = _below(target, inner)
                path.chmod(member.mode & 0o777)
                os.utime(path, (member.mtime, member.mtime))
    return len(members)


def _walk(source: Path, name: PurePosixPath) -> Iterator[tuple[Path, PurePosixPath]]:
    yield source, name
    if source.is_dir() and not source.is_symlink():
        for child in sorted(source.iterdir()):
            yield from _walk(child, name / child.name)


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, path: Path, *, sparse: bool) -> None:
    with path.open("rb") as file:
        found = extents(file, info.size) if sparse else [(0, info.size)]
        if sum(length for _, length in found) == info.size:
            archive.addfile(info, file)
        else:
            archive.addfile(*_sparse(info, file, found))


def _sparse(info: tarfile.TarInfo, file: IO[bytes], found: _Extents) -> tuple[tarfile.TarInfo, _Parts]:
    """The member as GNU's sparse format 1.0 has it: a map in front of the data."""
    found = [*found, (info.size, 0)]  # the end, where the file ends in a hole
    numbers = [len(found), *(number for extent in found for number in extent)]
    head = b"".join(b"%d\n" % number for number in numbers)
    head += bytes(-len(head) % _BLOCK)
    name = PurePosixPath(info.name)
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(info.size),
    }
    info.name = str(name.parent / "GNUSparseFile.0" / name.name)
    info.size = len(head) + sum(length for _, length in found)
    return info, _Parts(head, file, found)


class _Parts(io.RawIOBase):
    """A head, then the extents of a file, as one stream."""

    def __init__(self, head: bytes, file: IO[bytes], found: _Extents) -> None:
        self._head = head
        self._file = file
        self._left = [extent for extent in found if extent[1]]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = bytearray()
        while size < 0 or len(data) < size:
            chunk = self._next(_CHUNK if size < 0 else size - len(data))
            if not chunk:
                break
            data += chunk
        return bytes(data)

    def _next(self, size: int) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        if not self._left:
            return b""
        start, length = self._left[0]
        self._file.seek(start)
        data = self._file.read(min(size, length))
        if len(data) < length:
            self._left[0] = (start + len(data), length - len(data))
        if len(data) == length or not data:
            self._left.pop(0)
        return data


def _inner(member: tarfile.TarInfo, name: str) -> PurePosixPath:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        raise ArchiveError(f"{member.name!r} is neither file, directory nor link")
    return _relative(member.name, name)


def _relative(path: str, name: str) -> PurePosixPath:
    """`path` below `name`. Raises `ArchiveError` for one that is not."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise ArchiveError(f"{path!r} leads out of the archive")
    try:
        return pure.relative_to(PurePosixPath(name))
    except ValueError as error:
        raise ArchiveError(f"{path!r} is not below {name!r}") from error


def _below(target: Path, inner: PurePosixPath) -> Path:
    return target.joinpath(*inner.parts)


def _make(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Directories and files. No link exists yet, so every name leads where it says."""
    if member.isdir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    elif member.isfile():
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            _fill(archive, member, file)
        path.chmod(member.mode & 0o777)
        os.utime(path, (member.mtime, member.mtime))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)


def _fill(archive: tarfile.TarFile, member: tarfile.TarInfo, file: IO[bytes]) -> None:
    data = archive.extractfile(member)
    assert data is not None
    with contextlib.closing(data):
        for start, length in _extents_of(member):
            data.seek(start)
            file.seek(start)
            shutil.copyfileobj(_Limited(data, length), file, _CHUNK)
        file.truncate(member.size)


def _extents_of(member: tarfile.TarInfo) -> _Extents:
    found: _Extents | None = getattr(member, "sparse", None)
    return (
        [(0, member.size)] if found is None else [(start, min(length, member.size - start)) for start, length in found]
    )


class _Limited(io.RawIOBase):
    """At most so many bytes of a stream."""

    def __init__(self, source: IO[bytes], left: int) -> None:
        self._source = source
        self._left = left

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data
