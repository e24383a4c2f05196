"""Metadata that outlives the server: SQLite by default, any SQLAlchemy URL by setting."""

from __future__ import annotations

from sandyard.config import Settings
from sandyard.store.database import Database, sqlite_url
from sandyard.store.records import DeathRecord, LeaseRecord, SandboxRecord
from sandyard.store.store import Store

__all__ = ["DeathRecord", "LeaseRecord", "SandboxRecord", "Store", "open_store"]


async def open_store(settings: Settings) -> Store:
    """Open `server.database` (default: SQLite under `paths.state`), migrated. Raises `HostError`."""
    if settings.server.database is None:
        settings.paths.state.mkdir(parents=True, exist_ok=True)
    store = Store(Database(settings.server.database or sqlite_url(settings.paths.state / "sandyard.db")))
    try:
        await store.open()
    except BaseException:
        await store.close()
        raise
    return store
