"""A directory as the tar of an image's layer: the same directory is the same bytes on every node.

Names in order, times in whole seconds, none of symlinks; owners as the sandbox sees them. A whiteout (character
device 0/0) becomes `.wh.NAME` and an opaque directory `.wh..wh..opq` (OCI image specification, "Layer Filesystem
Changeset"), which is what the unpacking of images takes.
"""

from __future__ import annotations

import os
import stat
import struct
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sandyard.images.owners import CAPABILITY
from sandyard.store.blobs import BlobError

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_OPAQUE_MARK = "trusted.overlay.opaque"
_KEPT = "user."
_PIECE = 1 << 20
_BLOCK = 512
_REVISION_2, _REVISION_3, _REVISIONS = 0x02000000, 0x03000000, 0xFF000000


def pack(root: Path, uid_base: int) -> Iterator[bytes]:
    """The tar, piece by piece; `root` does not change meanwhile. Sockets are left out. Blocking.

    Raises `BlobError` naming what a layer cannot hold, and `OSError`."""
    links: dict[tuple[int, int], str] = {}
    yield from _entry(root, ".", uid_base, links)
    for folder, names, files in os.walk(root, onerror=_raise):
        names.sort()
        inside = os.path.relpath(folder, root)
        prefix = "" if inside == "." else f"{inside}/"
        if prefix and _attribute(Path(folder), _OPAQUE_MARK) == b"y":
            yield _header(tarfile.TarInfo(f"{prefix}{_OPAQUE}"))
        for name in sorted([*names, *files]):
            yield from _entry(Path(folder, name), f"{prefix}{name}", uid_base, links)
    yield bytes(2 * _BLOCK)


def _raise(error: OSError) -> None:
    raise error


def _entry(path: Path, name: str, uid_base: int, links: dict[tuple[int, int], str]) -> Iterator[bytes]:
    found = path.lstat()
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(found.st_mode)
    member.uid, member.gid = max(found.st_uid - uid_base, 0), max(found.st_gid - uid_base, 0)
    member.mtime = int(found.st_mtime)
    if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
        parent, _, last = name.rpartition("/")
        yield _header(tarfile.TarInfo(f"{parent}/{_WHITEOUT}{last}" if parent else f"{_WHITEOUT}{last}"))
        return
    if path.name.startswith(_WHITEOUT):
        raise BlobError(f"{path}: no layer can hold a file whose name begins with {_WHITEOUT}")
    if stat.S_ISLNK(found.st_mode):
        member.type, member.linkname, member.mtime = tarfile.SYMTYPE, os.readlink(path), 0
        yield _header(member)
    elif stat.S_ISDIR(found.st_mode):
        member.type = tarfile.DIRTYPE
        yield _header(_with_attributes(member, path))
    elif stat.S_ISFIFO(found.st_mode):
        member.type = tarfile.FIFOTYPE
        yield _header(member)
    elif stat.S_ISREG(found.st_mode):
        if found.st_nlink > 1:
            first = links.setdefault((found.st_dev, found.st_ino), name)
            if first != name:
                member.type, member.linkname = tarfile.LNKTYPE, first
                yield _header(member)
                return
        member.size = found.st_size
        yield _header(_with_attributes(member, path))
        yield from _content(path, found.st_size)


def _content(path: Path, size: int) -> Iterator[bytes]:
    come = 0
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
        while data := file.read(_PIECE):
            come += len(data)
            yield data
    if come != size:
        raise OSError(f"{path} has {come} bytes, and had {size} a moment ago")
    yield bytes(-size % _BLOCK)


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _with_attributes(member: tarfile.TarInfo, path: Path) -> tarfile.TarInfo:
    found = {name: os.getxattr(path, name, follow_symlinks=False) for name in _names(path) if name.startswith(_KEPT)}
    capability = _attribute(path, CAPABILITY)
    if capability is not None and (plain := _unbound(capability)) is not None:
        found[CAPABILITY] = plain
    member.pax_headers = {
        f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in sorted(found.items())
    }
    return member


def _names(path: Path) -> list[str]:
    with suppress(OSError):  # none on this file system
        return os.listxattr(path, follow_symlinks=False)
    return []


def _attribute(path: Path, name: str) -> bytes | None:
    with suppress(OSError):  # it has no such attribute, or its file system has none
        return os.getxattr(path, name, follow_symlinks=False)
    return None


def _unbound(value: bytes) -> bytes | None:
    """File capabilities without the namespace they were bound to (linux/capability.h)."""
    if len(value) not in (20, 24):
        return None
    magic, *bits = struct.unpack("<5I", value[:20])
    if magic & _REVISIONS not in (_REVISION_2, _REVISION_3):
        return None
    return struct.pack("<5I", _REVISION_2 | magic & ~_REVISIONS & 0xFFFFFFFF, *bits)
