"""Envs of a run from a pool, as the settings say: in this process, or over Ray workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sandyard.envs.base import Env
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.train.config import TrainConfig


@asynccontextmanager
async def pooled_envs(factory: EnvFactory, config: TrainConfig) -> AsyncIterator[Callable[[], Env]]:
    """`make_env` for an engine or a trainer. The pool ends with the context.

    Raises `Unsupported` for envs whose episodes are on a server, `HostError` without Ray.
    """
    async with EnvPool(factory, config.pool()) as pool:
        yield pool.lease
