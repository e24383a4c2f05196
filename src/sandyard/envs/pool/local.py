"""The worker that is this process."""

from __future__ import annotations

from collections.abc import Sequence

from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.base import Worker
from sandyard.envs.pool.messages import unpack
from sandyard.envs.pool.shard import Shard


class LocalWorker(Worker):
    """What is sent and answered is packed all the same: an env that works here works in a process of its own."""

    def __init__(self, factory: EnvFactory, slots: Sequence[int], close_timeout: float) -> None:
        self._shard = Shard(factory, slots, close_timeout)
        self.opened = unpack(self._shard.open())

    async def call(self, slot: int, request: bytes) -> bytes:
        return await self._shard.call(slot, request)

    async def release(self, slot: int) -> None:
        await self._shard.release(slot)

    async def drop(self, slot: int) -> None:
        await self._shard.drop(slot)

    async def close(self) -> None:
        await self._shard.close()

    def kill(self) -> None:
        """It ends with the process."""
