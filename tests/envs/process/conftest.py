"""A fork server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.server import SessionServer
from sandyard.envs.process.session import ProcessSession

SMALL = SessionLimits(memory_mb=256, tmp_mb=8, processes=24)


@pytest.fixture
async def server() -> AsyncIterator[SessionServer]:
    async with SessionServer(SMALL) as server:
        yield server


@pytest.fixture
async def session(server: SessionServer) -> ProcessSession:
    return await server.open()
