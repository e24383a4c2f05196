"""Alembic's entry: migrates through the connection that `Database.migrate` hands over."""

from __future__ import annotations

from alembic import context

from sandyard.store.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
