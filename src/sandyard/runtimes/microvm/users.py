"""The host users of VMMs, and of tools that work on guests' disks: each has one that nothing else of this host's state
has.

What is taken is written in no list that could be wrong: it is what stands in `Layout.disks`, where all of them have
their directory before they run, and what runs. So a user is free again once that is gone, however it went.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path

from sandyard.errors import CreateFailed
from sandyard.runtimes.microvm.layout import Layout

COUNT = 1_000_000
"""How many there are, from `Layout.first_uid` on."""
_LOOKED_AT = 1000  # files of one directory: there are far fewer, unless a VMM of an earlier version made them
_LOCK = ".users.lock"  # has the number of the last one that was given


def make_home(layout: Layout, own: Path) -> int:
    """Make the directory `own` of a VMM or a tool in `Layout.disks`; the user it is for, that reads it, and makes no
    file in it. Blocking. Raises `CreateFailed`, with nothing made."""
    try:
        with _alone(layout) as lock:
            uid = _free(layout, lock)
            own.mkdir(mode=0o700)
            try:
                give_home(own, uid)
            except BaseException:
                own.rmdir()
                raise
            return uid
    except OSError as error:
        raise CreateFailed("disk", f"{own}: {error.strerror}") from error


def give_home(own: Path, uid: int) -> None:
    """Let the directory `own` be for the user, which reads it and makes no file in it. Raises `OSError`."""
    os.chown(own, 0, uid)
    own.chmod(0o750)


@contextmanager
def _alone(layout: Layout) -> Iterator[FileIO]:
    """Among all processes with this state."""
    with FileIO(os.open(layout.assets / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _free(layout: Layout, lock: FileIO) -> int:
    """One that nothing has; not soon one that was given before. Raises `CreateFailed`."""
    taken, first, begin = set(_owners(layout.disks)), layout.first_uid, _begin(layout, lock)
    for step in range(COUNT):
        number = (begin + step) % COUNT
        uid = first + number
        if uid not in taken and not _runs(uid):
            lock.seek(0)
            lock.truncate()
            lock.write(str(number).encode())
            return uid
    raise CreateFailed(
        "user",
        f"all {COUNT} host users for VMMs, {first} to {first + COUNT - 1}, are taken",
        remedy="destroy sandboxes that are not needed, or set container.uid_base to where users are free",
    )


def _begin(layout: Layout, lock: FileIO) -> int:
    """Behind the last one. States begin at different places: what one has stored another does not know."""
    lock.seek(0)
    with suppress(ValueError):
        return (int(lock.read(32)) + 1) % COUNT
    return int.from_bytes(hashlib.sha256(os.fsencode(layout.state)).digest()[:8], "big") % COUNT


def _owners(home: Path) -> Iterator[int]:
    """Of what lies in `home`, and in the directories in there."""
    with os.scandir(home) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):  # it goes just now
                found = entry.stat(follow_symlinks=False)
                yield from (found.st_uid, found.st_gid)
                if entry.is_dir(follow_symlinks=False):
                    with os.scandir(entry.path) as inner:
                        yield from (each.stat(follow_symlinks=False).st_uid for each in islice(inner, _LOOKED_AT))


def _runs(uid: int) -> bool:
    """Whether a process of this user does, also one that belongs to another state of this host."""
    try:
        os.getpriority(os.PRIO_USER, uid)
    except ProcessLookupError:
        return False
    return True
