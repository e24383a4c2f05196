"""Pools on both kinds of workers, and a look at what Ray leaves behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sandyard.envs.base import Env
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.pool.ray import SESSION_TOKEN, RayRuntime
from sandyard.envs.pool.settings import PoolSettings
from tests.envs.pool.probes import ProbeEnv

OpenPool = Callable[..., AbstractAsyncContextManager[EnvPool]]


def our_environment() -> dict[str, str]:
    """For a Python of its own that imports this tree."""
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}


def ray_processes(token: str = SESSION_TOKEN, title: bytes = b"") -> set[int]:
    """Processes of the Ray whose token that is, by default of this process's own; of those called `title`."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "environ").read_bytes() and title in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue  # it ended meanwhile
    return found - {os.getpid()}


def wait_for_no(find: Callable[[], object], seconds: float) -> None:
    """Until `find` finds nothing."""
    deadline = time.monotonic() + seconds
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    """One Ray for all pools of a module: to start it takes seconds. When it goes, nothing of it is left."""
    RayRuntime.acquire(4)
    try:
        yield
    finally:
        RayRuntime.release()
    wait_for_no(ray_processes, 20)
    assert not list(Path("/tmp").glob(f"sy-ray-{os.getpid()}-*"))


@pytest.fixture(params=["local", "ray"])
def open_pool(request: pytest.FixtureRequest, ray_up: None) -> OpenPool:
    """`open_pool(size=4, workers=2, kind=ProbeEnv, …)` on each kind of worker."""
    remote = request.param == "ray"

    @asynccontextmanager
    async def make(
        size: int = 4, workers: int = 2, kind: Callable[..., Env] = ProbeEnv, seed: int = 0, **kwargs: Any
    ) -> AsyncIterator[EnvPool]:
        settings = PoolSettings(size=size, workers=workers, remote=remote, seed=seed, close_timeout=2.0)
        async with asyncio.timeout(50), EnvPool(EnvFactory.of(kind, **kwargs), settings) as pool:
            yield pool

    return make
