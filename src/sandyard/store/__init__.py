"""Metadata that outlives the server: SQLite by default, any SQLAlchemy URL by setting."""

from __future__ import annotations

import os
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError
from sandyard.store.database import Database, sqlite_url
from sandyard.store.records import BuildRecord, DeathRecord, LeaseRecord, SandboxRecord, TagRecord, TemplateRecord
from sandyard.store.store import Store

__all__ = [
    "BuildRecord",
    "DeathRecord",
    "LeaseRecord",
    "SandboxRecord",
    "Store",
    "TagRecord",
    "TemplateRecord",
    "open_store",
]


def _make_private(path: Path) -> None:
    """It holds what clients put into environments; SQLite gives its side files the same mode."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except OSError as error:
        remedy = "see paths.state, and whether its disk is full"
        raise HostError(f"database {path}: {error.strerror}", remedy=remedy) from error


async def open_store(settings: Settings) -> Store:
    """Open `server.database` (default: SQLite under `paths.state`), migrated. Raises `HostError`."""
    if settings.server.database is None:
        _make_private(settings.paths.state / "sandyard.db")
    store = Store(Database(settings.server.database or sqlite_url(settings.paths.state / "sandyard.db")))
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store
