"""A node of its own over real containers, and over the in-memory runtime."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.connection import Connection
from sandyard.server.embedded import EmbeddedServer


def node_settings(home: Path, **sandbox: object) -> Settings:
    """Short paths: Unix sockets must fit. Templates are the host's own."""
    (home / "state").mkdir()
    (home / "state" / "templates").symlink_to(Settings().paths.state / "templates")
    return Settings(
        paths=PathSettings(state=home / "state", run=home / "run"),
        pool=PoolSettings.model_validate({"low": 1, "high": 4}),
        sandbox=SandboxSettings.model_validate(sandbox),
    )


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedServer]:
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    with EmbeddedServer(node_settings(home)) as server:
        yield server
    shutil.rmtree(home)


@pytest.fixture
def connection(node: EmbeddedServer) -> Connection:
    return Connection.to(node)
