"""What is checked of sandboxes' files: layers of builds and snapshots, and the index of the build cache."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.images.garbage.base import Checkup, Finding
from sandyard.images.garbage.checks import note
from sandyard.runtimes.container.derived import delta_of, exists, parent_of
from sandyard.runtimes.deltas import Delta
from sandyard.sandboxes.remote.lazy import orders_in
from sandyard.sandboxes.storage import guests
from sandyard.sandboxes.storage.references import References

_SUPERBLOCK, _MAGIC = 1024, 0xEF53
_PROBLEMS = 4  # bits of the status of e2fsck: errors that were left as they are


class CommittedLayers:
    """`layers`: what builds and snapshots wrote. Each is there that is needed, and is a file system, or a whole delta
    to one. What nothing needs is an orphan, which a running server removes by itself."""

    kind = "layers of builds and snapshots"

    def __init__(self, home: Path, references: References, cached: set[Path], *, quiet: float = 0.0) -> None:
        """`quiet`: what was written to within so many seconds may be about to get a name, and is no orphan."""
        self._home = home
        self._references = references
        self._cached = cached
        self._quiet = quiet

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind)
        needed: dict[Path, str] = dict.fromkeys(self._cached, "the build cache") | self._references.in_use
        needed = {layer: who for layer, who in needed.items() if layer.parent == self._home}
        for layer, who in sorted(needed.items()):
            self._check(layer, who, found, deep=deep)
        above = self._below(needed)
        for layer in sorted(above - needed.keys()):
            self._check(layer, "what was kept as the difference to it", found, deep=deep)
        self._strays(needed.keys() | above, found)
        return found

    def _check(self, layer: Path, who: str, found: Checkup, *, deep: bool) -> None:
        if layer.is_symlink():  # it is on its way from shared storage
            self._check_link(layer, found)
            return
        if not exists(layer):
            cached = who == "the build cache"  # it forgets by itself
            (found.orphans if cached else found.damaged).append(Finding(layer.name, f"is missing, for {who}"))
            found.count += 1
            return
        delta = delta_of(layer)
        path = delta if delta.is_file() else layer
        found.size_bytes += _bytes(delta) + _bytes(layer)
        note(found, layer.name, path, _problem(layer, deep=deep))

    def _check_link(self, layer: Path, found: Checkup) -> None:
        found.count += 1
        if (orders_in(self._home.parent) / layer.name).exists() or layer.exists():
            found.unknown += 1
        elif layer.is_symlink():  # it did not become whole meanwhile
            found.damaged.append(Finding(layer.name, "is on its way, and nobody brings it", layer))

    def _below(self, needed: Mapping[Path, str]) -> set[Path]:
        found: set[Path] = set()
        for layer in needed:
            try:
                while (below := parent_of(layer)) is not None and below not in found:
                    found.add(below)
                    layer = below
            except (SandboxError, OSError):
                continue  # told by its own check
        return found

    def _strays(self, known: set[Path], found: Checkup) -> None:
        if not self._home.is_dir():
            return
        for path in sorted(self._home.iterdir()):
            if path.with_name(path.name.partition(".")[0]) in known:
                continue
            with suppress(FileNotFoundError):
                if self._quiet and time.time() - path.stat().st_mtime < self._quiet:
                    continue
                found.orphans.append(Finding(path.name, "nothing needs it", path))


class BuildCache:
    """`builds/cache.json`: it can be read. Entries that name what is gone are orphans, of no effect."""

    kind = "build cache"

    def __init__(self, index: Path) -> None:
        self._index = index

    @property
    def layers(self) -> set[Path]:
        """What it names, as far as it can be read."""
        try:
            records = json.loads(self._index.read_text())
            return {Path(layer) for record in records.values() for layer in record["layers"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind)
        try:
            records = json.loads(self._index.read_text())
            for key, record in records.items():
                found.count += 1
                missing = [layer for layer in record["layers"] if not exists(Path(layer))]
                if missing:
                    found.orphans.append(Finding(key[:16], f"{missing[0]} is not there any more"))
        except FileNotFoundError:
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found.damaged.append(Finding(self._index.name, f"cannot be read: {error}", self._index))
        return found


class Foundations:
    """Trees outside `layers` that builds and sandboxes name: layers of images, files of the node's templates."""

    kind = "what builds and sandboxes stand on"

    def __init__(self, home: Path, references: References) -> None:
        self._trees = {path: who for path, who in references.in_use.items() if path.parent != home}

    def check(self, *, deep: bool) -> Checkup:
        found = Checkup(self.kind, count=len(self._trees))
        for path, who in sorted(self._trees.items()):
            if not exists(path):
                found.damaged.append(Finding(str(path), f"is missing, for {who}"))
        return found


def _problem(layer: Path, *, deep: bool) -> str | None:
    try:
        if delta_of(layer).is_file():
            with Delta(delta_of(layer)) as delta:
                if not exists(layer.with_name(delta.parent)):
                    return f"it is kept as the difference to {delta.parent}, which is not there"
                if deep:
                    delta.verify()
            return None
        if not layer.is_file():
            return None
        return guests.problem_of(layer, deep=deep) if guests.is_guests(layer) else _file_system(layer, deep=deep)
    except FileNotFoundError:
        return None  # merged or removed meanwhile
    except (SandboxError, OSError) as error:
        return str(error)


def _file_system(image: Path, *, deep: bool) -> str | None:
    """By its superblock (ext4 disk layout: magic at 56, blocks at 4, block size at 24), and deeply by e2fsck."""
    with image.open("rb") as file:
        file.seek(_SUPERBLOCK)
        block = file.read(1024)
    if len(block) < 1024 or struct.unpack_from("<H", block, 56)[0] != _MAGIC:
        return "it is no ext4 file system"
    size = struct.unpack_from("<I", block, 4)[0] << (10 + struct.unpack_from("<I", block, 24)[0])
    if image.stat().st_size < size:
        return f"it is cut: {image.stat().st_size} of {size} bytes"
    tool = shutil.which("e2fsck", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if deep and tool is not None:
        done = subprocess.run([tool, "-fn", str(image)], capture_output=True, text=True, check=False)
        if done.returncode & _PROBLEMS:
            return f"e2fsck: {' '.join(done.stdout.split()[-12:])}"
    return None


def _bytes(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.is_file() else 0
