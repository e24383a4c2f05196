"""The tables. Times are seconds since the epoch; JSON columns hold what the caller gave, unread."""

from __future__ import annotations

import sqlalchemy as sa

HEAD = "0002"  # the newest migration; a database at this revision starts without loading alembic

metadata = sa.MetaData()

sandboxes = sa.Table(
    "sandboxes",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("runtime", sa.String(32), nullable=False),
    sa.Column("template", sa.String(255), nullable=False),
    sa.Column("template_id", sa.String(255), nullable=False),
    sa.Column("metadata", sa.JSON, nullable=False),
    sa.Column("envs", sa.JSON, nullable=False),
    sa.Column("defaults", sa.JSON, nullable=False),
    sa.Column("resources", sa.JSON, nullable=False),
    sa.Column("secured", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("end_at", sa.Double, nullable=False),
    sa.Column("on_timeout", sa.String(16), nullable=False),
    sa.Column("idle_timeout", sa.Double, nullable=True),
    sa.Column("lease_id", sa.String(64), nullable=True),
    sa.Column("extension", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("build_id", sa.String(64), nullable=False, server_default=""),
    sa.Column("layers", sa.JSON, nullable=False, server_default="[]"),
    sa.Column("start", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("network", sa.JSON, nullable=False, server_default="{}"),
    sa.Column("pause_memory", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("auto_resume", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("paused_at", sa.Double, nullable=True),
    sa.Column("pause_mode", sa.String(16), nullable=True),
    sa.Column("dead_at", sa.Double, nullable=True),
    sa.Column("death_reason", sa.String(16), nullable=True),
    sa.Column("death_detail", sa.Text, nullable=True),
    sa.Index("ix_sandboxes_state_dead_at", "state", "dead_at"),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("ttl", sa.Double, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_hash", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)

templates = sa.Table(
    "templates",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("names", sa.JSON, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False),
    sa.Column("source", sa.String(64), nullable=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
)

builds = sa.Table(
    "builds",
    metadata,
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

tags = sa.Table(
    "tags",
    metadata,
    sa.Column("template_id", sa.String(64), primary_key=True),
    sa.Column("tag", sa.String(255), primary_key=True),
    sa.Column("build_id", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
)
