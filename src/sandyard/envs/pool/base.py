"""The contract of a worker: where a shard of a pool's slots lives."""

from __future__ import annotations

from abc import ABC, abstractmethod

from sandyard.envs.pool.messages import Opened
from sandyard.errors import SandboxError


class WorkerLost(SandboxError):
    """The worker is gone, and with it the episodes of its slots."""


class Worker(ABC):
    """Requests and replies are packed `messages`. Every call may raise `WorkerLost`."""

    opened: Opened

    @abstractmethod
    async def call(self, slot: int, request: bytes) -> bytes: ...

    @abstractmethod
    async def release(self, slot: int) -> None:
        """Close the slot's env; it may be reset again."""

    @abstractmethod
    async def drop(self, slot: int) -> None:
        """End what runs in the slot and forget its env."""

    @abstractmethod
    async def close(self) -> None:
        """Close all envs, as far as they can be."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker now. Idempotent."""
