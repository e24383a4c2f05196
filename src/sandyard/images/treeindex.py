"""What a tree of files held when it was made, written beside it, so that it can be checked later.

`files.idx` is gzip of JSON lines, in the order of a walk: `[path, mode, uid, gid, size, mtime_ns, detail, attributes]`.
`detail` is the SHA-256 of a file, the target of a symlink, the number of a device; `attributes` the SHA-256 of all
extended attributes, empty where there are none. Directories have no size: it is the file system's own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = "files.idx"
_LIMIT = 8  # differences that are told
_CHUNK = 1 << 20

Entry = list[Any]


@dataclass(frozen=True, slots=True)
class Indexed:
    """`disk_bytes` as the file system allocates them, each hard link once."""

    entries: int
    disk_bytes: int


def write_index(tree: Path, target: Path) -> Indexed:
    """Describe `tree`, a directory or one file, in the new file `target`. Blocking. Raises `OSError`."""
    count = size = 0
    seen: set[tuple[int, int]] = set()
    with gzip.GzipFile(target, "wb", compresslevel=1, mtime=0) as out:
        for name, fd, path in _walk(tree):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if (found.st_dev, found.st_ino) not in seen:
                size += found.st_blocks * 512
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                seen.add((found.st_dev, found.st_ino))
            out.write(json.dumps(_entry(path, name, fd, found, deep=True)).encode() + b"\n")
            count += 1
    return Indexed(count, size)


def differences(tree: Path, index: Path, *, deep: bool) -> list[str]:
    """What of `tree` is not as `index` says, at most a few; nothing where all is. Without `deep` no content and no
    extended attribute is read. Blocking. Raises `FileNotFoundError` where there is no such index."""
    found: list[str] = []
    try:
        with gzip.open(index, "rt") as lines:
            expected = (json.loads(line) for line in lines)
            for problem in _compare(tree, expected, deep=deep):
                found.append(problem)
                if len(found) >= _LIMIT:
                    return [*found, "and maybe more"]
    except FileNotFoundError:
        raise
    except (EOFError, ValueError, zlib.error, OSError) as error:
        found.append(f"cannot be compared: {error}")
    return found


def _compare(tree: Path, expected: Iterator[Entry], *, deep: bool) -> Iterator[str]:
    """Both are in the same order, so one walk is enough; where names differ the rest is told by name alone."""
    actual = _walk(tree)
    for entry in expected:
        at = next(actual, None)
        if at is None or at[2] != entry[0]:
            wanted = {entry[0], *(other[0] for other in expected)}
            there = {name[2] for name in (at, *actual) if name is not None}
            yield from (f"/{path}: is missing" for path in sorted(wanted - there))
            yield from (f"/{path}: was not there" for path in sorted(there - wanted))
            return
        name, fd, path = at
        now = _entry(path, name, fd, os.stat(name, dir_fd=fd, follow_symlinks=False), deep=deep)
        for what, old, new in zip(_FIELDS, entry[1:], now[1:], strict=True):
            if new is not None and old != new:
                yield f"/{path}: {what} is {new}, was {old}"
    for _, _, path in actual:
        yield f"/{path}: was not there"


_FIELDS = ("mode", "uid", "gid", "size", "mtime", "content", "attributes")


def _walk(tree: Path) -> Iterator[tuple[str, int | None, str]]:
    """(name, descriptor of its directory, path) of the root and all below it, in an order that is always the same.
    No symlink is followed."""
    yield str(tree), None, ""
    if tree.is_symlink() or not tree.is_dir():
        return
    top = str(tree)
    for folder, directories, files, fd in os.fwalk(tree):
        directories.sort()
        below = os.path.relpath(folder, top)
        for name in sorted((*directories, *files)):
            yield name, fd, name if below == "." else f"{below}/{name}"


def _entry(path: str, name: str, fd: int | None, found: os.stat_result, *, deep: bool) -> Entry:
    is_dir = stat.S_ISDIR(found.st_mode)
    detail: str | None = ""
    if stat.S_ISLNK(found.st_mode):
        detail = os.readlink(name, dir_fd=fd)
    elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        detail = str(found.st_rdev)
    elif stat.S_ISREG(found.st_mode):
        detail = _content(name, fd) if deep else None
    attributes = _attributes(name, fd) if deep else None
    size = 0 if is_dir else found.st_size
    return [path, found.st_mode, found.st_uid, found.st_gid, size, found.st_mtime_ns, detail, attributes]


def _content(name: str, fd: int | None) -> str:
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME
    descriptor = os.open(name, flags, dir_fd=fd)
    try:
        while chunk := os.read(descriptor, _CHUNK):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _attributes(name: str, fd: int | None) -> str:
    path = name if fd is None else f"/proc/self/fd/{fd}/{name}"
    names: list[str] = []
    with suppress(OSError):  # a file system without them
        names = sorted(os.listxattr(path, follow_symlinks=False))
    if not names:
        return ""
    digest = hashlib.sha256()
    for each in names:
        digest.update(os.fsencode(each) + b"\0" + os.getxattr(path, each, follow_symlinks=False) + b"\0")
    return digest.hexdigest()
