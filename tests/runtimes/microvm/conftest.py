"""Real guests: one state directory for a module's tests, and a runtime that leaves nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.config import PathSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.assets import make_assets


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    yield Settings(paths=PathSettings(state=home / "state", run=home / "run"))
    shutil.rmtree(home)


@pytest_asyncio.fixture
async def runtime(settings: Settings) -> AsyncIterator[MicroVMRuntime]:
    """Everything a test leaves is removed; that nothing stays is asserted."""
    await make_assets(settings)
    opened = MicroVMRuntime(settings)
    yield opened
    for sandbox_id in await opened.list():
        await opened.destroy(sandbox_id)
    assert await opened.list() == []
    await opened.close()
    assert not any((root / opened.host.layout.cgroup_parent).exists() for root in opened.host.cgroups.roots.values())


@pytest_asyncio.fixture
async def base() -> Rootfs:
    return (await build_base(Settings())).rootfs
