"""Which process the VMMs that stand ready are of, so that what a dead one left goes, and a living one's stays."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandyard.runtimes.container.cgroups import Cgroups
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.spare import remove_spare

_NAME = re.compile(r"spare-([0-9a-f]{8})-[0-9]+")  # none that a sandbox can have
_LOCK = re.compile(r"\.spares-([0-9a-f]{8})")


class Owner:
    """Holds a lock while it lives, which goes with its process."""

    def __init__(self, layout: Layout) -> None:
        """Blocking. Raises `OSError`."""
        self._count = 0
        while True:
            self._id = secrets.token_hex(4)
            self._path = _lock_of(layout, self._id)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if _is(self._path, self._descriptor):
                return
            os.close(self._descriptor)  # `sweep` took it for a dead one's in that moment

    def name(self) -> str:
        """A new one."""
        self._count += 1
        return f"spare-{self._id}-{self._count}"

    def close(self) -> None:
        """Nothing of its names is left."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep(layout: Layout, cgroups: Cgroups) -> None:
    """Remove what dead owners left. Blocking. Raises `SandboxError`, `OSError`."""
    names = {match[0]: match[1] for match in map(_NAME.fullmatch, _found(layout, cgroups)) if match}
    locks = {match[1] for match in map(_LOCK.fullmatch, _listed(layout.homes)) if match}
    for owner in sorted({*locks, *names.values()}):
        with _dead(_lock_of(layout, owner)) as dead:
            if dead:
                for name in sorted(name for name, of in names.items() if of == owner):
                    remove_spare(layout, cgroups, name)


@contextmanager
def _dead(lock: Path) -> Iterator[bool]:
    """Whether nobody holds it; it is gone afterwards then, if all went well."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield _is(lock, descriptor)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock_of(layout: Layout, owner: str) -> Path:
    return layout.homes / f".spares-{owner}"


def _found(layout: Layout, cgroups: Cgroups) -> Iterator[str]:
    yield from cgroups.ids()
    for parent in (layout.homes, layout.disks, layout.memories):
        yield from _listed(parent)


def _listed(parent: Path) -> list[str]:
    return os.listdir(parent) if parent.is_dir() else []
