"""Who is at work with the layer store: what they use or are about to write, so that nobody takes it from under them.

A hold is a file below `.holds`, locked as long as its process lives. It is read and written under the store's guard:
shared by those who find or add a layer, exclusive to whoever removes some. Layers that a template, a build or a
sandbox names need no hold.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandyard.errors import HostError

_HOLDS, _GUARD = ".holds", ".guard"


class Hold:
    """What one piece of work holds. Its methods may be called from several threads."""

    def __init__(self, home: Path, descriptor: int) -> None:
        self._home = home
        self._descriptor = descriptor
        self._keys: set[str] = set()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, key: str, landed: int = 0) -> None:
        """Hold a layer, of which so many bytes are being written no more. Call under the guard, before anybody could
        remove it."""
        with self._lock:
            self._keys.add(key)
            self._bytes -= landed
            self._write()

    def reserve(self, count: int) -> None:
        """Say how many more bytes (or fewer) are being written."""
        with guard(self._home), self._lock:
            self._bytes += count
            self._write()

    def _write(self) -> None:
        data = json.dumps({"keys": sorted(self._keys), "bytes": self._bytes}).encode()
        if os.pwrite(self._descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, len(data))


@dataclass(frozen=True, slots=True)
class Held:
    """What all who are at work hold together."""

    keys: frozenset[str] = field(default_factory=frozenset)
    bytes: int = 0


@contextlib.contextmanager
def hold(home: Path) -> Iterator[Hold]:
    """Hold nothing yet. Raises `OSError`."""
    folder = home / _HOLDS
    home.mkdir(mode=0o711, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / os.urandom(8).hex()
    with guard(home):  # locked before anybody reads it
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield Hold(home, descriptor)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def read_holds(home: Path) -> Held:
    """What is held now; holds of processes that died are removed. Call under the guard, exclusive."""
    keys: set[str] = set()
    total = 0
    for path in (home / _HOLDS).glob("*"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                record = _read(path, file.read())
                keys |= set(record.get("keys", ()))
                total += record.get("bytes", 0)
            else:
                path.unlink()
    return Held(frozenset(keys), total)


def _read(path: Path, data: bytes) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(data or b"{}")
    except ValueError as error:  # cut by a full disk: nobody knows what it holds, so nothing may go
        raise HostError(f"hold {path} is damaged", remedy="free disk space, and end the pulls under way") from error
    return record


@contextlib.contextmanager
def guard(home: Path, *, exclusive: bool = False) -> Iterator[None]:
    """Keep what the store holds as it is, or change it. For moments only. Blocking."""
    home.mkdir(mode=0o711, parents=True, exist_ok=True)
    with open(home / _GUARD, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
