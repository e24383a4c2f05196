"""Templates, builds and tags in the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from sandyard.store.database import Database
from sandyard.store.records import BuildRecord, TagRecord, TemplateRecord
from sandyard.store.schema import builds, tags, templates


class CatalogTables:
    """Every method commits before it returns and may raise `HostError` when the database fails."""

    def __init__(self, database: Database) -> None:
        self._run = database.run

    async def load(self) -> tuple[Sequence[TemplateRecord], Sequence[BuildRecord], Sequence[TagRecord]]:
        def work(connection: sa.Connection) -> tuple[list[TemplateRecord], list[BuildRecord], list[TagRecord]]:
            return (
                [TemplateRecord(**row) for row in connection.execute(templates.select()).mappings()],
                [BuildRecord(**row) for row in connection.execute(builds.select()).mappings()],
                [TagRecord(**row) for row in connection.execute(tags.select()).mappings()],
            )

        return await self._run(work)

    async def put_template(self, record: TemplateRecord) -> None:
        await self._run(_put(templates, _values(record, TemplateRecord.__slots__), ("id",)))

    async def put_build(self, record: BuildRecord) -> None:
        await self._run(_put(builds, _values(record, BuildRecord.__slots__), ("id",)))

    async def put_tags(self, records: Sequence[TagRecord]) -> None:
        works = [_put(tags, _values(r, TagRecord.__slots__), ("template_id", "tag")) for r in records]

        def work(connection: sa.Connection) -> None:
            for one in works:
                one(connection)

        await self._run(work)

    async def drop_tags(self, template_id: str, names: Sequence[str]) -> None:
        gone = tags.delete().where(tags.c.template_id == template_id, tags.c.tag.in_(names))
        await self._run(lambda connection: _done(connection.execute(gone)))

    async def drop_build(self, build_id: str) -> None:
        """Tags that name it go with it."""

        def work(connection: sa.Connection) -> None:
            connection.execute(tags.delete().where(tags.c.build_id == build_id))
            connection.execute(builds.delete().where(builds.c.id == build_id))

        await self._run(work)

    async def drop_template(self, template_id: str) -> None:
        """Its builds and tags go with it."""

        def work(connection: sa.Connection) -> None:
            connection.execute(tags.delete().where(tags.c.template_id == template_id))
            connection.execute(builds.delete().where(builds.c.template_id == template_id))
            connection.execute(templates.delete().where(templates.c.id == template_id))

        await self._run(work)


def _values(record: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _put(table: sa.Table, values: dict[str, Any], keys: Sequence[str]) -> Callable[[sa.Connection], None]:
    """Replace the row of these keys. Portable: not every database has the same upsert."""

    def work(connection: sa.Connection) -> None:
        row = sa.and_(*(table.c[key] == values[key] for key in keys))
        connection.execute(table.delete().where(row))
        connection.execute(table.insert(), values)

    return work


def _done(_result: object) -> None:
    return None
