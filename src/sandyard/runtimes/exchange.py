"""Two files that exchange their names at one moment (renameat2(2))."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_EXCHANGE = 2
_HERE = -100  # AT_FDCWD
_ABSENT = (errno.EINVAL, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)


def put_in_place(new: Path, old: Path) -> None:
    """Give `new` the name of `old`, which goes; unlike with a rename only if there is one. Raises `FileNotFoundError`
    where somebody removed it, `OSError`."""
    if _libc.renameat2(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE) == 0:
        new.unlink()
        return
    code = ctypes.get_errno()
    if code not in _ABSENT:
        raise OSError(code, os.strerror(code), str(old))
    old.stat()  # this file system has no such call: who removes it just now leaves what is named anew
    os.replace(new, old)
