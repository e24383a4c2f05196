"""Templates, their builds and tags; what a sandbox needs to be paused."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "templates",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("names", sa.JSON, nullable=False),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("source", sa.String(64), nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "builds",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("template_id", sa.String(64), nullable=False, index=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("layers", sa.JSON, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("reason", sa.JSON, nullable=True),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double, nullable=True),
    )
    op.create_table(
        "tags",
        sa.Column("template_id", sa.String(64), primary_key=True),
        sa.Column("tag", sa.String(255), primary_key=True),
        sa.Column("build_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    for column in _columns():
        op.add_column("sandboxes", column)


def _columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("extension", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("build_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("layers", sa.JSON, nullable=False, server_default="[]"),
        sa.Column("start", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("network", sa.JSON, nullable=False, server_default="{}"),
        sa.Column("pause_memory", sa.Boolean, nullable=False, server_default=sa.true()),
        sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("paused_at", sa.Double, nullable=True),
        sa.Column("pause_mode", sa.String(16), nullable=True),
    ]


def downgrade() -> None:
    for column in _columns():
        op.drop_column("sandboxes", column.name)
    for table in ("tags", "builds", "templates"):
        op.drop_table(table)
