"""One database, one connection, one thread: calls never block the event loop and never interleave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sandyard.errors import HostError
from sandyard.store.schema import HEAD

T = TypeVar("T")


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


class Database:
    """Runs functions of a connection, each in one transaction, in one thread."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandyard-store")
        self._engine = sa.create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=not url.startswith("sqlite"))
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction that is committed when it returns. Raises `HostError`.

        The transaction is carried through even when the caller is cancelled meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, work)

    def _call(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            remedy = "free space there" if "disk is full" in str(cause) else "check server.database"
            raise HostError(f"database {self._engine.url!r}: {cause}", remedy=remedy) from error

    async def migrate(self) -> None:
        """Bring the tables to the newest revision. Raises `HostError`."""
        await self.run(_upgrade)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
        self._thread.shutdown()


def _prepare_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # With WAL, NORMAL survives the death of this process; after a power cut no sandbox lives anyway.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()


def _upgrade(connection: sa.Connection) -> None:
    if _revision(connection) == HEAD:
        return
    from alembic import command  # loading it costs more than a start with nothing to migrate
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
