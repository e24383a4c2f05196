"""Where blobs lie between the registry and the layer store; what a killed process left there is found and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError


def downloads_home(settings: Settings) -> Path:
    return settings.paths.state.absolute() / "downloads"


@contextmanager
def downloading(settings: Settings) -> Iterator[Path]:
    """A directory of one's own, removed afterwards. Raises `HostError`."""
    home = downloads_home(settings)
    with ExitStack() as stack:
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _lock(home):  # until it is locked itself
                scratch = Path(tempfile.mkdtemp(dir=home))
                stack.callback(shutil.rmtree, scratch, ignore_errors=True)
                stack.enter_context(_lock(scratch))
        except OSError as error:
            raise HostError(f"downloads {home}: {error}", remedy="check paths.state and its disk") from error
        yield scratch


def leftovers(settings: Settings) -> Sequence[Path]:
    """What processes left that were killed. Blocking."""
    home = downloads_home(settings)
    if not home.is_dir():
        return []
    found: list[Path] = []
    with _lock(home):
        for entry in home.iterdir():
            try:
                with _lock(entry, wait=False):
                    found.append(entry)
            except (BlockingIOError, FileNotFoundError, NotADirectoryError):
                continue  # at work, or done just now
    return found


@contextmanager
def _lock(folder: Path, *, wait: bool = True) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
