"""Uploads that were promised and are not done, for the next start of the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sandyard.sandboxes.copying import Snapshot


class Pending:
    """One file a build. Blocking."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def put(self, snapshot: Snapshot) -> None:
        self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._home / snapshot.build.id
        draft = path.with_name(f"{path.name}.part")
        draft.write_text(json.dumps([snapshot.template.tenant, f"{snapshot.template.id}:{snapshot.tag}"]))
        draft.rename(path)

    def has(self, build_id: str) -> bool:
        return (self._home / build_id).exists()

    def drop(self, build_id: str) -> None:
        (self._home / build_id).unlink(missing_ok=True)

    def all(self) -> Sequence[tuple[str, str, str]]:
        """Build id, tenant and reference of each; what cannot be read is forgotten."""
        found: list[tuple[str, str, str]] = []
        for path in self._home.iterdir() if self._home.is_dir() else ():
            with suppress(OSError, ValueError, TypeError):
                tenant, reference = json.loads(path.read_text())
                found.append((path.name, str(tenant), str(reference)))
                continue
            path.unlink(missing_ok=True)
        return found
