"""A slot lent out for one episode after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.envs.pool.slot import Slot
from sandyard.errors import Conflict
from sandyard.tasks.base import Task


class Lender(Protocol):
    """The part of a pool that lends slots."""

    def tools(self) -> Sequence[ToolSpec]: ...

    def time_limits(self) -> Mapping[str, float]: ...

    async def take(self) -> Slot: ...

    def put(self, slot: Slot) -> None: ...


class PooledEnv(Env):
    """Waits in `reset` for a slot, keeps it until `close`. Its answers are the slot's."""

    def __init__(self, pool: Lender) -> None:
        self._pool = pool
        self._slot: Slot | None = None
        self._submission: str | None = None

    async def reset(self, task: Task | None = None) -> StepResult:
        if self._slot is None:
            self._slot = await self._pool.take()
        return await self._slot.reset(task)

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        return await self._held().step(tool_name, arguments)

    def tools(self) -> Sequence[ToolSpec]:
        return self._slot.tools() if self._slot is not None else self._pool.tools()

    def time_limits(self) -> Mapping[str, float]:
        return self._pool.time_limits()

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        return await self._held().execute(code, timeout=timeout)

    @property
    def submission(self) -> str | None:
        return self._slot.submission if self._slot is not None else self._submission

    async def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is None:
            return
        self._submission = slot.submission
        try:
            await slot.close()
        finally:
            self._pool.put(slot)

    def _held(self) -> Slot:
        if self._slot is None:
            raise Conflict("the env is closed", remedy="call reset first")
        return self._slot
