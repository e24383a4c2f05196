"""One server per state directory and per run directory: two would destroy each other's sandboxes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from sandyard.errors import Conflict, HostError

LOCK_FILE = "server.lock"


class DirectoryLock:
    """Held until closed or until the process dies, however it dies. The file says who holds it."""

    def __init__(self, directory: Path) -> None:
        """Raises `Conflict` naming the server that holds it, or `HostError`."""
        self._path = directory / LOCK_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unfit(directory, error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._holder()
            os.close(self._descriptor)
            remedy = "use that one, stop it, or set other paths.state and paths.run"
            raise Conflict(f"a server already runs on {directory}{holder}", remedy=remedy) from error

    def describe(self, url: str) -> None:
        """Leave word for whoever comes next. Raises `HostError`."""
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "url": url}).encode(), 0)
        except OSError as error:
            raise _unfit(self._path.parent, error) from error

    def close(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _holder(self) -> str:
        try:
            known = json.loads(self._path.read_text())
            return f" (pid {known['pid']}, {known['url']})"
        except (OSError, ValueError, KeyError, TypeError):
            return " (it is still starting)"


def _unfit(directory: Path, error: OSError) -> HostError:
    remedy = "run as root or set paths.state"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        remedy = "free space there, or set paths.state and paths.run to a disk that can be written"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        remedy = "set paths.state and paths.run to directories"
    return HostError(f"directory {directory}: {error.strerror}", remedy=remedy)
