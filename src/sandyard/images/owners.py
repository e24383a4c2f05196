"""Move a tree's owners into the id range of sandboxes, once, when it is unpacked.

A sandbox's user namespace maps its ids 0..65535 to `base`.. on the host; files in a template must
carry the shifted ids already, so that starting a sandbox touches no file.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

ID_COUNT = 65536
NOBODY = 65534
CAPABILITY = "security.capability"
_REVISION_2, _REVISION_3 = 0x02000000, 0x03000000


def shifted(number: int, base: int) -> int:
    """The host's id for id `number` of a sandbox; ids it cannot have become nobody."""
    return base + (number if 0 <= number < ID_COUNT else NOBODY)


def shift_tree(root: Path, base: int) -> int:
    """Shift every owner below and including `root`; return the bytes on disk.

    Modes survive with their set-id bits, file capabilities are bound to the namespace, hard links
    are seen once, device nodes are removed (a sandbox gets its own). Symlinks are never followed.
    Safe to repeat after a crash. Raises `OSError`.
    """
    total = 0
    _shift(str(root), None, base)
    for _, directories, files, fd in os.fwalk(root):
        for name in (*directories, *files):
            total += _shift(name, fd, base)
    return total


def _shift(name: str, fd: int | None, base: int) -> int:
    entry = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if stat.S_ISBLK(entry.st_mode) or stat.S_ISCHR(entry.st_mode):
        os.unlink(name, dir_fd=fd)
        return 0
    if entry.st_uid >= base:
        return 0 if entry.st_nlink > 1 and stat.S_ISREG(entry.st_mode) else entry.st_blocks * 512
    capability = _capability(name, fd, base) if stat.S_ISREG(entry.st_mode) else None
    os.chown(name, shifted(entry.st_uid, base), shifted(entry.st_gid, base), dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISLNK(entry.st_mode):
        os.chmod(name, stat.S_IMODE(entry.st_mode), dir_fd=fd)  # chown took the set-id bits
    if capability is not None:
        os.setxattr(f"/proc/self/fd/{fd}/{name}", CAPABILITY, capability, follow_symlinks=False)
    return entry.st_blocks * 512


def _capability(name: str, fd: int | None, base: int) -> bytes | None:
    path = f"/proc/self/fd/{fd}/{name}" if fd is not None else name
    with suppress(OSError):  # no such attribute, or no attributes on this file system
        return bind_capability(os.getxattr(path, CAPABILITY, follow_symlinks=False), base)
    return None


def bind_capability(value: bytes, base: int) -> bytes | None:
    """Turn file capabilities (revision 2 or 3, linux/capability.h) into those of the namespace whose
    root is host id `base` (revision 3). None where they are of another revision."""
    if len(value) not in (20, 24):
        return None
    magic, *bits = struct.unpack("<5I", value[:20])
    if magic & 0xFF000000 not in (_REVISION_2, _REVISION_3):
        return None
    return struct.pack("<6I", _REVISION_3 | magic & 0x00FFFFFF, *bits, base)
