"""The envs of one worker, whether that is another process or this one."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

from sandyard.envs.base import Env, Execution, StepResult
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.messages import (
    Execute,
    Opened,
    Reply,
    Request,
    Reset,
    pack_opened,
    pack_reply,
    portable,
    unpack,
)
from sandyard.errors import Conflict, Unsupported

logger = logging.getLogger(__name__)


def refuse_elsewhere(kind: object) -> None:
    """Raise `Unsupported` for a class of envs whose episodes are on a server."""
    where = getattr(kind, "lives_elsewhere", "")
    if where:
        raise Unsupported(
            f"{getattr(kind, '__name__', kind)} cannot be pooled: its episode is {where}, a pool would only relay it",
            remedy="make one env for each trajectory and turn ENV_REMOTE off",
        )


class Shard:
    """One env for each of `slots`, made when first reset, and made anew after one that failed.

    What an env raises is its slot's answer. Calls to one slot come one after another; `drop` may come at
    any time, and ends what runs there.
    """

    def __init__(self, factory: EnvFactory, slots: Sequence[int], close_timeout: float) -> None:
        self._factory = factory
        self._slots = list(slots)
        self._close_timeout = close_timeout
        self._envs: dict[int, Env] = {}
        self._spoilt: set[int] = set()
        self._running: dict[int, asyncio.Task[bytes]] = {}

    def open(self) -> bytes:
        """What the envs are like, from the first of them; an `error` says that there can be none."""
        try:
            env = self._make(self._slots[0])
            return pack_opened(Opened(os.getpid(), list(env.tools()), dict(env.time_limits())))
        except Exception as error:  # noqa: BLE001 - whatever the factory raises is for the pool's owner
            return pack_opened(Opened(os.getpid(), error=portable(error)))

    async def call(self, slot: int, request: bytes) -> bytes:
        """A packed `Reply` to a packed `Request`."""
        work = asyncio.create_task(self._answer(slot, unpack(request)))
        self._running[slot] = work
        try:
            return await work
        finally:
            work.cancel()
            if self._running.get(slot) is work:
                del self._running[slot]

    async def release(self, slot: int) -> None:
        """Close the slot's env and keep it for the next episode."""
        env = self._envs.get(slot)
        if env is not None and not await self._close(slot, env):
            del self._envs[slot]

    async def drop(self, slot: int) -> None:
        """End what runs in the slot, close its env and forget it."""
        work = self._running.pop(slot, None)
        if work is not None:
            work.cancel()
            await asyncio.wait([work], timeout=self._close_timeout)
        await self._discard(slot)

    async def close(self) -> None:
        """Drop all slots."""
        await asyncio.gather(*(self.drop(slot) for slot in self._slots))

    def _make(self, slot: int) -> Env:
        refuse_elsewhere(self._factory.find())
        env = self._factory.make()
        refuse_elsewhere(type(env))
        self._envs[slot] = env
        return env

    async def _answer(self, slot: int, request: Request) -> bytes:
        try:
            value = await self._do(slot, request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what an env raises is its slot's answer
            self._spoilt.add(slot)
            return pack_reply(Reply(error=portable(error)))
        env = self._envs[slot]
        return pack_reply(Reply(value, specs=list(env.tools()), submission=env.submission))

    async def _do(self, slot: int, request: Request) -> StepResult | Execution:
        if isinstance(request, Reset):
            if slot in self._spoilt:  # nobody knows in what state a failure left the env
                await self._discard(slot)
            env = self._envs.get(slot) or self._make(slot)
            return await env.reset(request.task)
        open_env = self._envs.get(slot)
        if open_env is None:
            raise Conflict(f"slot {slot} has no episode", remedy="reset it first")
        if isinstance(request, Execute):
            return await open_env.execute(request.code, timeout=request.timeout)
        return await open_env.step(request.tool_name, request.arguments)

    async def _discard(self, slot: int) -> None:
        self._spoilt.discard(slot)
        env = self._envs.pop(slot, None)
        if env is not None:
            await self._close(slot, env)

    async def _close(self, slot: int, env: Env) -> bool:
        """Whether it went well; a failure is logged, the env is given up."""
        try:
            async with asyncio.timeout(self._close_timeout):
                await env.close()
        except Exception as error:  # noqa: BLE001 - the slot must be usable again whatever closing raises
            logger.warning("closing the env of slot %d failed: %s: %s", slot, type(error).__name__, error)
            return False
        return True
