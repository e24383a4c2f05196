"""Which manifest each layer of this node has: made once, since a layer never changes."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path


class Known:
    """One small file a layer, below `<state>/blobs`; losing one costs reading the layer again. Blocking."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def get(self, layer: Path) -> str | None:
        """The digest of its manifest, if it was ever made."""
        try:
            record = json.loads(self._path(layer).read_text())
            return str(record["manifest"]) if record["layer"] == str(layer) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def put(self, layer: Path, digest: str) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(layer)
        draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
        try:
            draft.write_text(json.dumps({"layer": str(layer), "manifest": digest}))
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Forget layers that are no more, and what killed processes left."""
        if not self._home.is_dir():
            return
        for path in self._home.iterdir():
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                layer = Path(json.loads(path.read_text())["layer"])
                if layer.exists() or layer.with_name(f"{layer.name}.delta").exists():
                    continue
            path.unlink(missing_ok=True)

    def _path(self, layer: Path) -> Path:
        return self._home / hashlib.sha256(str(layer).encode()).hexdigest()
