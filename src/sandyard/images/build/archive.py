"""Uploaded tar archives: read on the host without unpacking, and sent on with the names of their destination.

Nothing of an archive is written on the host; what its names do happens within the sandbox.
"""

from __future__ import annotations

import copy
import tarfile
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandyard.errors import BadRequest
from sandyard.images.entries import StrangeEntry, entries

MAX_ENTRIES = 1_000_000
_BLOCK = 512
_CHUNK = 1 << 20
_MAGIC = ("*", "?", "[", "{")


@dataclass(frozen=True, slots=True)
class Picked:
    """One entry of an archive that a COPY takes. `name` is relative to the destination, "" the file itself."""

    name: str
    member: tarfile.TarInfo
    content: IO[bytes] | None  # of a regular file; to be read before the next entry is asked for


def source_root(pattern: str) -> str:
    """The part of a source that no wildcard touches: what lies below it goes below the destination."""
    parts: list[str] = []
    for part in clean(pattern):
        if any(mark in part for mark in _MAGIC):
            break
        parts.append(part)
    return "/".join(parts)


def pick(archive: Path, root: str, *, root_too: bool = False) -> Generator[Picked, None, None]:
    """Entries at or below `root`, in their order; of a directory at `root` only if `root_too`. Blocking.

    Raises `BadRequest` for an archive that cannot be read and for names that leave it."""
    try:
        with tarfile.open(archive, "r|*", tarinfo=StrangeEntry) as tar:
            for member in entries(tar, MAX_ENTRIES):
                name = _below("/".join(clean(member.name)), root)
                if name is None or (not name and member.isdir() and not root_too):
                    continue
                if member.islnk():
                    member.linkname = _link_target(member, root)
                elif not (member.isreg() or member.isdir() or member.issym()):
                    continue  # devices and pipes are no part of a build context
                yield Picked(name, member, tar.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadRequest(f"the archive cannot be read: {error}") from error


class Reader:
    """Entries as `pick` has them, to be read from threads one at a time. Closing waits for a read that is under
    way: whoever awaited it may have been cancelled."""

    def __init__(self, entries: Generator[Picked, None, None]) -> None:
        self._entries = entries
        self._lock = threading.Lock()
        self._closed = False

    def entry(self) -> Picked | None:
        with self._lock:
            return None if self._closed else next(self._entries, None)

    def read(self, parts: Iterator[bytes]) -> bytes:
        """The next of `content`, empty at its end."""
        with self._lock:
            return b"" if self._closed else next(parts, b"")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._entries.close()


def check_archive(archive: Path, limit: int) -> int:
    """Read an archive to its end; the bytes of its files. Blocking.

    Raises `BadRequest` where it is none, its names leave it, or its files pass `limit` bytes."""
    size = 0
    for entry in pick(archive, ""):
        size += entry.member.size if entry.member.isreg() else 0
        if size > limit:
            raise BadRequest(f"the files of the archive pass {limit} bytes")
    return size


def header(entry: Picked, name: str, owner: tuple[int, int] | None, mode: int | None) -> bytes:
    """The entry's tar header under another name, owner and mode (None: its own)."""
    member = copy.copy(entry.member)
    member.name = name
    if member.isreg():
        member.type = tarfile.REGTYPE
    member.uid, member.gid = owner or (member.uid, member.gid)
    member.uname = member.gname = ""  # numbers count: names are the sandbox's business
    member.mtime = int(member.mtime)
    member.pax_headers = {}
    if mode is not None and not member.issym():
        member.mode = mode
    # GNU's form of long names is the one that BusyBox reads too.
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def content(entry: Picked, *, padded: bool) -> Iterator[bytes]:
    """A regular file's bytes; `padded` to whole blocks, as a tar has them."""
    if entry.content is None:
        return
    while data := entry.content.read(_CHUNK):
        yield data
    if padded and (rest := entry.member.size % _BLOCK):
        yield bytes(_BLOCK - rest)


END = bytes(2 * _BLOCK)


def clean(name: str) -> list[str]:
    """The parts of a path within an archive. Raises `BadRequest` for one that leaves it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    kept: list[str] = []
    for part in parts:
        if part != "..":
            kept.append(part)
        elif kept:
            kept.pop()
        else:
            raise BadRequest(f"'{name}' leaves the build context")
    return kept


def _below(name: str, root: str) -> str | None:
    if not root or name == root:
        return name if not root else ""
    return name.removeprefix(f"{root}/") if name.startswith(f"{root}/") else None


def _link_target(member: tarfile.TarInfo, root: str) -> str:
    target = _below("/".join(clean(member.linkname)), root)
    if not target:
        raise BadRequest(f"'{member.name}' is a hard link to '{member.linkname}', which is not copied")
    return target
