"""A node of its own over real containers, and over the in-memory runtime."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from tests.yard import node_home, node_settings


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedServer]:
    with node_home() as home, EmbeddedServer(node_settings(home)) as server:
        yield server


@pytest.fixture
async def base_template() -> None:
    """The host's, built on first use, which takes a minute or two."""
    await build_base(Settings())


@pytest.fixture
def connection(node: EmbeddedServer) -> Connection:
    return Connection.to(node)
