"""A file as E2B clients see it: `filesystem.EntryInfo` in proto-JSON."""

from __future__ import annotations

import posixpath
from datetime import UTC, datetime

from sandyard.guest.base import FileInfo, FileType
from sandyard.server.envd.connect import Message
from sandyard.server.envd.metadata import showable

_TYPES = {FileType.FILE: "FILE_TYPE_FILE", FileType.DIRECTORY: "FILE_TYPE_DIRECTORY"}
# Go's os.FileMode letters, which clients show as they come.
_LETTER = {FileType.DIRECTORY: "d", FileType.SYMLINK: "L", FileType.OTHER: "D"}
_SPECIAL = ((0o4000, "u"), (0o2000, "g"), (0o1000, "t"))


def permissions(kind: FileType, mode: int) -> str:
    """`-rw-r--r--`, `drwxr-xr-x`, `dtrwxrwxrwx`, `Lrwxrwxrwx`."""
    letters = _LETTER.get(kind, "") + "".join(letter for bit, letter in _SPECIAL if mode & bit)
    bits = "".join(char if mode & (0o400 >> i) else "-" for i, char in enumerate("rwxrwxrwx"))
    return (letters or "-") + bits


def timestamp(ns: int) -> str:
    """RFC 3339, with all nine digits."""
    seconds, fraction = divmod(ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{fraction:09d}Z"


def entry(info: FileInfo) -> Message:
    """For a symlink: type and mode of what it points to, and where that is."""
    kind, mode = info.type, info.mode
    if info.type is FileType.SYMLINK and info.target_type is not None:
        kind, mode = info.target_type, info.target_mode or 0
    fields: Message = {
        "name": info.name,
        "type": _TYPES.get(kind, "FILE_TYPE_SYMLINK" if kind is FileType.SYMLINK else "FILE_TYPE_UNSPECIFIED"),
        "path": info.path,
        "size": str(info.size),
        "mode": mode & 0o777,
        "permissions": permissions(info.type, info.mode),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": timestamp(info.mtime_ns),
        "metadata": showable(info.metadata),
    }
    if info.symlink_target is not None:
        fields["symlinkTarget"] = posixpath.normpath(posixpath.join(posixpath.dirname(info.path), info.symlink_target))
        fields["isSymlink"] = True
    return fields
