"""A yard over the in-memory runtime: the real lifecycle, nothing isolated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import CreateRequest, FixedTemplates, SandboxManager, TemplateView
from sandyard.store import open_store

OpenYard = Callable[..., AbstractAsyncContextManager[SandboxManager]]


class Wanted(Protocol):
    def __call__(
        self, template: str = ..., *, timeout: float = ..., tenant: str = ..., **more: Any
    ) -> CreateRequest: ...


class Until(Protocol):
    async def __call__(self, true: Callable[[], bool], seconds: float = ...) -> None: ...


@pytest.fixture
def wanted() -> Wanted:
    def request(template: str = "base", *, timeout: float = 60.0, tenant: str = "t", **more: Any) -> CreateRequest:
        return CreateRequest(tenant=tenant, template=template, timeout=timeout, **more)

    return request


@pytest.fixture
def until() -> Until:
    async def wait(true: Callable[[], bool], seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not happen in time"
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture
def open_yard(tmp_path: Path) -> OpenYard:
    """Opens a manager; opened again with the same runtime it is the next server on the same state."""

    @asynccontextmanager
    async def opened(
        runtime: MemoryRuntime, *, low: int = 0, high: int = 8, max_count: int = 0, keep: bool = False
    ) -> AsyncIterator[SandboxManager]:
        settings = Settings(
            paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run"),
            sandbox=SandboxSettings.model_validate({"runtime": "memory", "max_count": max_count}),
            pool=PoolSettings(low=low, high=high),
        )
        store = await open_store(settings)
        base = TemplateView("base", "base-1", Rootfs(layers=(), env={"IMAGE": "1"}), 0.0, 0)
        manager = SandboxManager(settings, runtime, FixedTemplates([base]), store)
        await manager.start()
        try:
            yield manager
        finally:
            await manager.stop(keep=keep)
            await store.close()

    return opened
