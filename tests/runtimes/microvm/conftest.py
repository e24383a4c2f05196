"""Real guests: one state directory for a module's tests, and a runtime that leaves nothing."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.config import PathSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.microvm import MicroVMRuntime
from tests.yard import guest_settings, node_home

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    qemu = Settings().microvm.qemu
    if shutil.which(qemu) is None:
        for item in items:
            if HERE in item.path.parents and item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason=f"this host has no {qemu}: sandyard setup microvm"))


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    with node_home() as home:
        paths = PathSettings(state=home / "state", run=home / "run")
        yield asyncio.run(guest_settings(Settings(paths=paths)))


@pytest_asyncio.fixture
async def runtime(settings: Settings) -> AsyncIterator[MicroVMRuntime]:
    """Everything a test leaves is removed; that nothing stays is asserted."""
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
