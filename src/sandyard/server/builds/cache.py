"""The layer cache of builds: an index beside the layers, of what each chain of steps came to."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from sandyard.images.build import Cached, State

log = structlog.get_logger("sandyard.builds")


class LayerCache:
    """Keys are of one tenant's chains each. A layer stays on disk while an entry here names it
    (`layers`), so whoever removes layers asks. Used from one event loop."""

    def __init__(self, index: Path) -> None:
        self._index = index
        self._entries: dict[str, tuple[float, Cached]] = {}

    def load(self) -> None:
        """Read the index; one that cannot be read is an empty cache. Blocking."""
        try:
            records = json.loads(self._index.read_text())
            self._entries = {key: (record["used_at"], _cached(record)) for key, record in records.items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the layer cache is lost", index=str(self._index), error=str(error))

    def get(self, key: str) -> Cached | None:
        found = self._entries.get(key)
        if found is None:
            return None
        if not all(layer.exists() for layer in found[1].layers):
            del self._entries[key]
            return None
        self._entries[key] = (time.time(), found[1])
        return found[1]

    def put(self, key: str, value: Cached) -> None:
        self._entries[key] = (time.time(), value)

    def save(self) -> None:
        """Write the index anew. Blocking. Raises `OSError`."""
        records = {key: _record(used_at, value) for key, (used_at, value) in list(self._entries.items())}
        self._index.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._index.with_name(f".{self._index.name}")
        draft.write_text(json.dumps(records))
        draft.rename(self._index)

    @property
    def layers(self) -> set[Path]:
        return {layer for _, value in self._entries.values() for layer in value.layers}

    def shrink(self, limit: int, named: Collection[Path], home: Path) -> None:
        """Forget the longest unused entries until the layers below `home` that only this cache holds are at
        most `limit` bytes. Blocking."""
        sizes = {layer: _size(layer) for layer in self.layers - set(named) if layer.is_relative_to(home)}
        for key, _ in sorted(self._entries.items(), key=lambda item: item[1][0]):
            held = self.layers
            if sum(size for layer, size in sizes.items() if layer in held) <= limit:
                return
            del self._entries[key]


def _size(layer: Path) -> int:
    try:
        if layer.is_dir():
            return sum(path.lstat().st_blocks * 512 for path in layer.rglob("*"))
        return layer.stat().st_blocks * 512
    except OSError:
        return 0


def _record(used_at: float, value: Cached) -> dict[str, Any]:
    return {
        "used_at": used_at,
        "layers": [str(layer) for layer in value.layers],
        "state": asdict(value.state),
        "size_bytes": value.size_bytes,
    }


def _cached(record: dict[str, Any]) -> Cached:
    layers = tuple(Path(layer) for layer in record["layers"])
    return Cached(layers, State(**record["state"]), record["size_bytes"])
