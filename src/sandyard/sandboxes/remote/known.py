"""Which manifest each layer of this node has: made once, since a layer never changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.sandboxes.remote.manifest import LayerManifest
from sandyard.sandboxes.remote.source import opened, present, stored_in
from sandyard.store.blobs.chunks import digest_of


@dataclass(frozen=True, slots=True)
class Record:
    """What a layer's manifest was, without its chunks. `stamp`: size and time of the file it was kept in, by which one
    is known that was merged with others since; None for a directory."""

    layer: Path
    manifest: str
    chunk_bytes: int
    size: int
    parents: list[str]
    stamp: list[int] | None


class Known:
    """One small file a layer, below `<state>/blobs`; losing one costs reading the layer again. Blocking."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def get(self, layer: Path) -> str | None:
        """The digest of its manifest, if it was ever made."""
        record = _read(self._path(layer))
        return record.manifest if record is not None and record.layer == layer else None

    def put(self, layer: Path, manifest: LayerManifest) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(layer)
        draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
        record = {
            "layer": str(layer),
            "manifest": manifest.digest(),
            "chunk_bytes": manifest.chunk_bytes,
            "size": manifest.size,
            "parents": manifest.parents,
            "stamp": stamp_of(layer),
        }
        try:
            draft.write_text(json.dumps(record))
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)

    def all(self) -> Iterator[Record]:
        """Those of layers that are here."""
        for path in sorted(self._home.iterdir()) if self._home.is_dir() else ():
            record = _read(path)
            if record is not None and present(record.layer):
                yield record

    def tidy(self) -> None:
        """Forget layers that are no more, and what killed processes left."""
        for path in self._home.iterdir() if self._home.is_dir() else ():
            record = _read(path)
            if record is None or not present(record.layer):
                path.unlink(missing_ok=True)

    def _path(self, layer: Path) -> Path:
        return self._home / hashlib.sha256(str(layer).encode()).hexdigest()


def stamp_of(layer: Path) -> list[int] | None:
    """As in `Record`."""
    with suppress(FileNotFoundError):
        path = stored_in(layer)
        found = path.stat()
        return None if path.is_dir() else [found.st_size, found.st_mtime_ns]
    return None


def manifest_of(layer: Path, like: Record | LayerManifest, uid_base: int) -> LayerManifest:
    """What the manifest of a layer that is here comes to, cut as `like` is, with the parents of that. Blocking.

    Raises `LayerGone`, `SandboxError` for a damaged one, `OSError`."""
    with opened(layer, like.chunk_bytes, uid_base, lambda _: None) as source:
        chunks = [(offset, len(data), digest_of(data)) for offset, data in source.pieces]
    return LayerManifest(
        source.kind, source.name, source.size or like.size, like.chunk_bytes, list(like.parents), chunks
    )


def _read(path: Path) -> Record | None:
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        stamp = [int(number) for number in found["stamp"]] if found["stamp"] is not None else None
        parents = [str(parent) for parent in found["parents"]]
        sizes = int(found["chunk_bytes"]), int(found["size"])
        return Record(Path(found["layer"]), str(found["manifest"]), *sizes, parents, stamp)
    return None
