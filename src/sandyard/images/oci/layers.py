"""Unpacked layers, kept once for every template that has them, found by what they hold.

`<state>/layers-oci/<key>/tree` is one layer as overlayfs takes it and `layer.json` beside it says
what it is. `key` is the digest of the layer's tar; for a layer that needs those below it, of the
whole chain. Both appear by one rename; what a killed process left is named `.making-*`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandyard.config import Settings
from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.unpack import unpack_layer

_MAKING = ".making-"


@dataclass(frozen=True, slots=True)
class Layer:
    """`size_bytes` of content; `used_at` in seconds since the epoch, to the minute."""

    key: str
    diff_id: str
    size_bytes: int
    tree: Path
    used_at: float = 0.0


def chain_id(diff_ids: Sequence[str]) -> str:
    """The name of a layer on top of others (OCI image specification, "ChainID"). `diff_ids` the lowest first."""
    chain = diff_ids[0]
    for diff_id in diff_ids[1:]:
        chain = f"sha256:{hashlib.sha256(f'{chain} {diff_id}'.encode()).hexdigest()}"
    return chain


class LayerStore:
    """Layers below `settings.paths.state`. Several processes may use it; each method is blocking."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.paths.state.absolute() / "layers-oci"
        self._uid_base = settings.container.uid_base
        self._max_bytes = settings.images.max_layer_mb << 20

    def find(self, diff_ids: Sequence[str]) -> Layer | None:
        """The topmost layer of these (the lowest first), if it is kept."""
        for key in dict.fromkeys((diff_ids[-1], chain_id(diff_ids))):
            layer = self._load(_plain(key))
            if layer is not None and layer.diff_id == diff_ids[-1]:
                self._touch(layer)
                return layer
        return None

    def add(self, blob: IO[bytes], diff_ids: Sequence[str], below: Sequence[Layer]) -> Layer:
        """Unpack the topmost of `diff_ids` from its blob; `below` are the layers under it, the topmost first.

        Raises `BadRequest` where the content is not what `diff_ids` says, or cannot be unpacked."""
        wanted = diff_ids[-1]
        with self._scratch() as scratch:
            trees = [layer.tree for layer in below]
            made = unpack_layer(blob, scratch / "tree", self._uid_base, self._max_bytes, trees)
            if made.diff_id != wanted:
                raise BadRequest(f"the layer holds {made.diff_id}, and its image says {wanted}")
            key = _plain(wanted if made.self_contained else chain_id(diff_ids))
            record = {"key": key, "diff_id": wanted, "size_bytes": made.size_bytes}
            (scratch / "layer.json").write_text(json.dumps(record))
            (scratch / "layer.json").chmod(0o644)
            scratch.chmod(0o711)
            return self._install(scratch, key)

    def all(self) -> Sequence[Layer]:
        """Every layer, the one unused for the longest first."""
        if not self.home.is_dir():
            return []
        found = [self._load(entry.name) for entry in os.scandir(self.home) if not entry.name.startswith(".")]
        return sorted((layer for layer in found if layer is not None), key=lambda layer: layer.used_at)

    def remove(self, layer: Layer) -> None:
        """Idempotent: it is renamed away first, so that half a layer is never found."""
        gone = self.home / f"{_MAKING}{os.urandom(8).hex()}"
        try:
            (self.home / layer.key).rename(gone)
        except FileNotFoundError:
            return
        shutil.rmtree(gone)

    def tidy(self) -> None:
        """Remove what killed processes left behind."""
        if not self.home.is_dir():
            return
        for entry in self.home.glob(f"{_MAKING}*"):
            with _lock(entry, blocking=False) as free:
                if free:
                    shutil.rmtree(entry)

    def plan(self, in_use: Collection[Path], low_bytes: int, high_bytes: int) -> Sequence[Layer]:
        """What to remove, the longest unused first, once the whole passes `high_bytes`, until it is below
        `low_bytes`. `in_use` are trees that templates, snapshots or sandboxes stand on."""
        layers = self.all()
        total = sum(layer.size_bytes for layer in layers)
        if total <= high_bytes:
            return []
        doomed: list[Layer] = []
        for layer in layers:
            if total <= low_bytes:
                break
            if layer.tree not in in_use:
                doomed.append(layer)
                total -= layer.size_bytes
        return doomed

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        try:
            self.home.mkdir(mode=0o711, parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=_MAKING, dir=self.home))
        except OSError as error:
            raise HostError(f"layer store {self.home}: {error}", remedy="check paths.state and its disk") from error
        with _lock(scratch, blocking=True):
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)  # it was renamed, as a rule

    def _install(self, scratch: Path, key: str) -> Layer:
        home = self.home / key
        try:
            scratch.rename(home)
        except OSError:
            if self._load(key) is None:
                raise
            # another made the same meanwhile
        layer = self._load(key)
        assert layer is not None  # renamed into place, or found just now
        return layer

    def _load(self, key: str) -> Layer | None:
        path = self.home / key / "layer.json"
        try:
            record = json.loads(path.read_text())
            used_at = path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        return Layer(record["key"], record["diff_id"], record["size_bytes"], self.home / key / "tree", used_at)

    def _touch(self, layer: Layer) -> None:
        if time.time() - layer.used_at > 60:
            os.utime(self.home / layer.key / "layer.json")


def _plain(digest: str) -> str:
    return digest.partition(":")[2]


@contextmanager
def _lock(folder: Path, *, blocking: bool) -> Iterator[bool]:
    """Hold a directory while it is written; `tidy` of another process then leaves it alone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
