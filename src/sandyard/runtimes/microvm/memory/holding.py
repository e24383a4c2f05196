"""What snapshots hold of the host's disk: their files are further names of each other's, and of bases' and
sandboxes'."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.bases import KEPT

_Key = tuple[int, int]


def held_bytes(layout: Layout, layers: Collection[Path], others: Collection[Path]) -> int:
    """Of these layers and all beside them, each file once: but for those of the `others`, the bases that stay without
    them too, and block images, which can be made again. Blocking."""
    common = {key for path in _kept(layout, others) for key, _ in _look(path)}
    found = dict(each for path in _files(layers) for each in _look(path))
    return sum(size for key, size in found.items() if key not in common)


def _files(layers: Collection[Path]) -> Iterator[Path]:
    """What has the name of one of them, or that, a dot and more. Each directory is read once."""
    names: dict[Path, set[str]] = {}
    for layer in layers:
        names.setdefault(layer.parent, set()).add(layer.name)
    for home, wanted in names.items():
        with suppress(OSError):
            for name in os.listdir(home):
                words = name.split(".")
                if any(".".join(words[:count]) in wanted for count in range(1, len(words) + 1)):
                    yield home / name


def _kept(layout: Layout, others: Collection[Path]) -> Iterator[Path]:
    yield from _files(others)
    if layout.images.is_dir():
        yield from layout.images.iterdir()
    dated = []
    for manifest in layout.bases.glob(f"[!.]*/{image.part(Path('*'), 'memory')}"):
        with suppress(OSError):  # it goes just now
            dated.append((manifest.stat().st_mtime, manifest))
    for _, manifest in sorted(dated, reverse=True)[:KEPT]:
        yield from manifest.parent.iterdir()


def _look(path: Path) -> Iterator[tuple[_Key, int]]:
    with suppress(OSError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            yield (found.st_dev, found.st_ino), found.st_blocks * 512
