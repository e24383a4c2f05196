"""Real guests: one state directory for a module's tests, and a runtime that leaves nothing.

What takes a boot is done once for all modules: the choice of an accelerator, and a base of the usual size."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.config import PathSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime
from tests.runtimes.microvm.victim import SMALL
from tests.yard import guest_settings, node_home, share_boots

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    qemu = Settings().microvm.qemu
    if shutil.which(qemu) is None:
        for item in items:
            if HERE in item.path.parents and item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason=f"this host has no {qemu}: sandyard setup microvm"))


@pytest.fixture(scope="session")
def booted() -> Iterator[Settings]:
    """A node on which a guest of `SMALL` has booted."""
    with node_home() as home:
        ready = asyncio.run(guest_settings(_settings(home)))
        asyncio.run(_boot(ready))
        yield ready


async def _boot(settings: Settings) -> None:
    runtime = MicroVMRuntime(settings)
    try:
        await runtime.create(SandboxSpec("booted", (await build_base(Settings())).rootfs, SMALL))
        await runtime.destroy("booted")
    finally:
        await runtime.close()


def _settings(home: Path) -> Settings:
    return Settings(paths=PathSettings(state=home / "state", run=home / "run"))


@pytest.fixture(scope="module")
def settings(booted: Settings) -> Iterator[Settings]:
    """A node of the module's own."""
    with node_home() as home:
        ready = asyncio.run(guest_settings(_settings(home)))
        share_boots(booted, ready)
        yield ready


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
