"""Nodes over the in-memory runtime that share a storage and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandyard.config import BlobSettings, PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import CreateRequest, FixedTemplates, Sandbox, SandboxManager, TemplateView
from sandyard.sandboxes.remote import RemoteSnapshots
from sandyard.store import open_store
from sandyard.store.blobs import BlobStore
from sandyard.store.blobs.memory import MemoryBlobs
from tests.store.blobs.peers import with_credentials

__all__ = ["with_credentials"]

OpenNode = Callable[..., AbstractAsyncContextManager[SandboxManager]]


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def open_node(tmp_path: Path) -> OpenNode:
    """Opens node `name`; opened again it is the next server on the same state."""

    @asynccontextmanager
    async def opened(
        name: str, blobs: BlobStore, *, keeps_memory: bool = False, **settings: Any
    ) -> AsyncIterator[SandboxManager]:
        given = Settings(
            paths=PathSettings(state=tmp_path / name / "state", run=tmp_path / name / "run"),
            sandbox=SandboxSettings.model_validate({"runtime": "memory", **settings.pop("sandbox", {})}),
            pool=PoolSettings(low=0, high=4),
            blobs=BlobSettings.model_validate({"chunk_kb": 64, **settings}),
        )
        store = await open_store(given)
        base = TemplateView("base", "base-1", Rootfs(layers=(), env={"IMAGE": name}), 0.0, 0)
        runtime = MemoryRuntime(MemoryAgent, keeps_memory=keeps_memory)
        manager = SandboxManager(given, runtime, FixedTemplates([base]), store)
        manager.remote = RemoteSnapshots(manager, blobs)
        await manager.start()
        await manager.remote.start()
        try:
            yield manager
        finally:
            await manager.remote.stop()
            await manager.stop()
            await manager.remote.close()
            await store.close()

    return opened


def remote_of(node: SandboxManager) -> RemoteSnapshots:
    assert node.remote is not None
    return node.remote


async def start(node: SandboxManager, template: str = "base", tenant: str = "t") -> Sandbox:
    return await node.create(CreateRequest(tenant=tenant, template=template, timeout=60.0))


async def read(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([chunk async for chunk in sandbox.agent.read_file(path)])
