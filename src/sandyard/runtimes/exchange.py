"""Two files or directories that exchange their names at one moment (renameat2(2))."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_EXCHANGE = 2
_HERE = -100  # AT_FDCWD
_ABSENT = (errno.EINVAL, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: Path, other: Path) -> None:
    """Each gets the name of the other. Raises `OSError`."""
    if code := _renameat2(one, other):
        raise OSError(code, f"{one} and {other}: {os.strerror(code)}")


def put_in_place(new: Path, old: Path) -> None:
    """Give `new` the name of `old`, which goes; unlike with a rename only if there is one. Raises `FileNotFoundError`
    where somebody removed it, `OSError`."""
    code = _renameat2(new, old)
    if code == 0:
        new.unlink()
        return
    if code not in _ABSENT:
        raise OSError(code, os.strerror(code), str(old))
    old.stat()  # this file system has no such call: who removes it just now leaves what is named anew
    os.replace(new, old)


def _renameat2(one: Path, other: Path) -> int:
    """0, or the number of the error."""
    done = _libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return 0 if done == 0 else ctypes.get_errno()
