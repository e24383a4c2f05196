"""A container runtime with paths of its own, and a root file system to start from."""

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
from sandyard.runtimes.container import ContainerRuntime


@pytest.fixture(scope="session")
def settings() -> Iterator[Settings]:
    """Short paths: Unix sockets must fit; the runtime's root must be able to walk to them."""
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    yield Settings(paths=PathSettings(state=home / "state", run=home / "run"))
    shutil.rmtree(home)


@pytest_asyncio.fixture
async def runtime(settings: Settings) -> AsyncIterator[ContainerRuntime]:
    """Everything a test leaves is removed; that it could be is asserted."""
    opened = ContainerRuntime(settings)
    yield opened
    await opened.close()
    later = ContainerRuntime(settings)
    for sandbox_id in await later.list():
        await later.destroy(sandbox_id)
    assert await later.list() == []
    await later.close()
    assert not any((root / later.layout.cgroup_parent).exists() for root in later.cgroups.roots.values())


@pytest.fixture
def empty(settings: Settings) -> Rootfs:
    """A root file system with nothing in it: the agent needs nothing."""
    layer = settings.paths.state / "nothing"
    layer.mkdir(parents=True, exist_ok=True)
    return Rootfs([layer])


@pytest_asyncio.fixture
async def base() -> Rootfs:
    """The host's base template, built on first use."""
    return (await build_base(Settings())).rootfs
