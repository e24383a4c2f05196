"""A node of its own over real containers, and over the in-memory runtime."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandyard.connection import Connection
from sandyard.server.embedded import EmbeddedServer
from tests.envs.helpers import node_settings


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedServer]:
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    with EmbeddedServer(node_settings(home)) as server:
        yield server
    shutil.rmtree(home)


@pytest.fixture
def connection(node: EmbeddedServer) -> Connection:
    return Connection.to(node)
