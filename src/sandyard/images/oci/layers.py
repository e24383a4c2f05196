"""Unpacked layers, kept once for every template that has them, found by what they hold.

`<state>/layers-oci/<key>/tree` is one layer as overlayfs takes it; beside it `layer.json` says what it is, and
`files.idx` what it holds. `key` is the digest of the layer's tar; for a layer that needs those below it, of the
whole chain. All appear by one rename; what a killed process left is named `.making-*`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandyard.config import Settings
from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.holds import Held, Hold, guard, read_holds
from sandyard.images.oci.unpack import unpack_layer
from sandyard.images.treeindex import NAME as INDEX
from sandyard.images.treeindex import write_index

_MAKING = ".making-"
_OWNERS = "owners"  # beside a tree: who has shown that they have its content
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Layer:
    """`size_bytes` of content, `disk_bytes` as the file system has them; `used_at` in seconds since the epoch, to
    the minute."""

    key: str
    diff_id: str
    size_bytes: int
    tree: Path
    used_at: float = 0.0
    disk_bytes: int = 0

    @property
    def home(self) -> Path:
        return self.tree.parent


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

    def find(self, diff_ids: Sequence[str], hold: Hold | None = None, owner: str | None = None) -> Layer | None:
        """The topmost layer of these (the lowest first), if it is kept; it is held from now on.

        `owner`: the tenant for whom, who gets what it, or the node, had the content of before: a digest alone is no
        secret. None: the node itself, whose layers are everyone's."""
        with guard(self.home):
            for key in dict.fromkeys((diff_ids[-1], chain_id(diff_ids))):
                layer = self._load(_plain(key))
                if layer is not None and layer.diff_id == diff_ids[-1] and _owned(layer.home, owner):
                    if hold is not None:
                        hold.add(layer.key)
                    self._touch(layer)
                    return layer
        return None

    def add(
        self,
        blob: IO[bytes],
        diff_ids: Sequence[str],
        below: Sequence[Layer],
        *,
        hold: Hold | None = None,
        owner: str | None = None,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> Layer:
        """Unpack the topmost of `diff_ids` from its blob; `below` are the layers under it, the topmost first.

        It is held from the moment it is there, and what it takes is reserved no more. `on_bytes` hears of what is about
        to be written, and may raise. Raises `BadRequest` where the content is not what `diff_ids` says, or cannot be
        unpacked, `HostError` where the disk fails."""
        wanted = diff_ids[-1]
        with self._scratch() as scratch:
            trees = [layer.tree for layer in below]
            made = unpack_layer(blob, scratch / "tree", self._uid_base, self._max_bytes, trees, on_bytes)
            if made.diff_id != wanted:
                raise BadRequest(f"the layer holds {made.diff_id}, and its image says {wanted}")
            key = _plain(wanted if made.self_contained else chain_id(diff_ids))
            try:
                landed = self._describe(scratch, key, wanted, made.size_bytes)
                return self._install(scratch, key, hold, landed, owner)
            except OSError as error:
                raise HostError(f"layer store {self.home}: {error}", remedy="check paths.state and its disk") from error

    def all(self) -> Sequence[Layer]:
        """Every layer, the one unused for the longest first."""
        if not self.home.is_dir():
            return []
        found = [self._load(entry.name) for entry in os.scandir(self.home) if not entry.name.startswith(".")]
        return sorted((layer for layer in found if layer is not None), key=lambda layer: layer.used_at)

    def used_bytes(self) -> int:
        """Bytes on disk of every layer, with those that are being written."""
        with guard(self.home, exclusive=True):
            return sum(layer.disk_bytes for layer in self.all()) + read_holds(self.home).bytes

    def held(self) -> Held:
        """What is at work. Call under the guard, exclusive."""
        return read_holds(self.home)

    def unlink(self, layer: Layer) -> Path | None:
        """Take a layer out of the store, whole: nobody finds half of one. What is to be deleted, if it was there.

        Call under the guard, exclusive, having seen to it that nobody needs it."""
        gone = self.home / f"{_MAKING}{os.urandom(8).hex()}"
        try:
            layer.home.rename(gone)
        except FileNotFoundError:
            return None
        return gone

    def leftovers(self) -> Sequence[Path]:
        """What killed processes left behind."""
        found: list[Path] = []
        for entry in self.home.glob(f"{_MAKING}*"):
            with _lock(entry, blocking=False) as free:
                if free:
                    found.append(entry)
        return found

    def tidy(self) -> None:
        """Remove what killed processes left behind."""
        if not self.home.is_dir():
            return
        with guard(self.home, exclusive=True):  # else one that was made just now and is not locked yet
            found = self.leftovers()
        for entry in found:
            shutil.rmtree(entry, ignore_errors=True)  # another may be at it

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with ExitStack() as stack:
            try:
                with guard(self.home):
                    scratch = Path(tempfile.mkdtemp(prefix=_MAKING, dir=self.home))
                    stack.enter_context(_lock(scratch, blocking=True))
            except OSError as error:
                raise HostError(f"layer store {self.home}: {error}", remedy="check paths.state and its disk") from error
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)  # it was renamed, as a rule

    def _describe(self, scratch: Path, key: str, diff_id: str, size: int) -> int:
        indexed = write_index(scratch / "tree", scratch / INDEX)
        record = {"key": key, "diff_id": diff_id, "size_bytes": size, "disk_bytes": indexed.disk_bytes}
        (scratch / "layer.json").write_text(json.dumps(record))
        (scratch / "layer.json").chmod(0o644)
        scratch.chmod(0o711)
        return indexed.disk_bytes

    def _install(self, scratch: Path, key: str, hold: Hold | None, landed: int, owner: str | None) -> Layer:
        with guard(self.home):
            if hold is not None:
                hold.add(key, landed)
            try:
                scratch.rename(self.home / key)
            except OSError:
                if self._load(key) is None:
                    raise
                # another made the same meanwhile
            layer = self._load(key)
            _own(self.home / key, owner)
        assert layer is not None  # renamed into place, or found just now
        return layer

    def _load(self, key: str) -> Layer | None:
        if not _KEY.fullmatch(key):
            return None
        path = self.home / key / "layer.json"
        try:
            record = json.loads(path.read_text())
            used_at = path.stat().st_mtime
            size, tree = record["size_bytes"], self.home / key / "tree"
            if record["key"] != key:
                return None
            return Layer(key, record["diff_id"], size, tree, used_at, record.get("disk_bytes", size))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _touch(self, layer: Layer) -> None:
        if time.time() - layer.used_at > 60:
            os.utime(layer.home / "layer.json")


def _owned(home: Path, owner: str | None) -> bool:
    """Whether whoever it is for has had the content of this layer, or may have it without."""
    if owner is None:
        _own(home, None)
        return True
    return any((home / _OWNERS / _mark(each)).exists() for each in (None, owner))


def _own(home: Path, owner: str | None) -> None:
    (home / _OWNERS).mkdir(mode=0o700, exist_ok=True)
    (home / _OWNERS / _mark(owner)).touch()


def _mark(owner: str | None) -> str:
    return "node" if owner is None else hashlib.sha256(owner.encode()).hexdigest()


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
