"""How much of the disk is what."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import Settings

KINDS = {
    "layers-oci": "layers of images",
    "templates": "node templates",
    "layers": "layers of builds and snapshots",
    "sandboxes": "disks of sandboxes",
    "microvm": "microVM images and disks",
    "files": "uploads for builds",
    "downloads": "downloads under way",
    "blobs": "what is known of shared layers",
    "builds": "build cache index and logs",
    "damaged": "set aside by verify --repair",
}
REST = "database and the rest"


@dataclass(frozen=True, slots=True)
class Use:
    """`size_bytes` as the file system allocates them, `count` of files and directories."""

    kind: str
    path: Path
    size_bytes: int
    count: int


def usage(settings: Settings) -> Sequence[Use]:
    """Of each kind below `paths.state`. Blocking; what comes and goes meanwhile is counted or not."""
    home = settings.paths.state.absolute()
    found = [Use(kind, home / name, *_sum(home / name)) for name, kind in KINDS.items() if (home / name).exists()]
    names = [entry.path for entry in os.scandir(home) if entry.name not in KINDS] if home.is_dir() else []
    rest = [_sum(Path(name)) for name in names]
    return [*found, Use(REST, home, sum(size for size, _ in rest), sum(count for _, count in rest))]


def _sum(root: Path) -> tuple[int, int]:
    """A file with several names counts once, and symlinks are not followed."""
    seen: set[tuple[int, int]] = set()
    size = count = 0
    stack = [str(root)]
    while stack:
        path = stack.pop()
        with suppress(FileNotFoundError, NotADirectoryError):
            found = os.lstat(path)
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                size += found.st_blocks * 512
            count += 1
            if os.path.isdir(path) and not os.path.islink(path):
                stack += [entry.path for entry in os.scandir(path)]
    return size, count
