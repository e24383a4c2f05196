"""What every env with tools shares: the tools, the submission, the end of an episode."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.envs.observation import DEFAULT_LIMIT, render_execution
from sandyard.envs.tools import EnvTool, ToolAnswer, ToolManager, invalid_call, parse_spec
from sandyard.errors import Conflict, GuestError
from sandyard.tasks.base import Task

EnvToolHandler = Callable[[Any, Mapping[str, Any]], ToolAnswer | Awaitable[ToolAnswer]]


class ToolEnv(Env):
    """An env whose actions are tools. A back end gives `_acquire`, `_release` and `execute`."""

    def __init__(self, *, observation_limit: int = DEFAULT_LIMIT) -> None:
        self.observation_limit = observation_limit
        self.manager = ToolManager()
        self.task: Task | None = None
        self._submission: str | None = None
        self._open = False
        self._over = False
        self._lock = asyncio.Lock()

    def register_tool(
        self,
        schema: ToolSpec | Mapping[str, Any],
        handler: EnvToolHandler,
        *,
        timeout: float | None = None,
        own_limit: float | None = None,
    ) -> None:
        """Give the policy a tool; one of the same name is replaced.

        `handler(env, arguments)`, sync or async, returns the observation or a whole `StepResult`. For
        `timeout` and `own_limit` (seconds) see `EnvTool`. Raises `BadRequest` when the schema is wrong.
        """
        spec = parse_spec(schema)
        tool = EnvTool(spec, lambda arguments: handler(self, arguments), timeout, self.observation_limit, own_limit)
        self.manager.register(tool)

    def time_limits(self) -> Mapping[str, float]:
        return self.manager.time_limits()

    def tools(self) -> Sequence[ToolSpec]:
        return self.manager.specs()

    @property
    def submission(self) -> str | None:
        return self._submission

    def submit(self, answer: str) -> StepResult:
        """Record the final answer; the episode is over. For handlers of submitting tools."""
        self._submission = answer
        return StepResult(observation="Submitted.", terminated=True)

    async def reset(self, task: Task | None = None) -> StepResult:
        async with self._lock:
            if self._open:
                await self._release()
            self._open, self._over = False, False
            self._submission, self.task = None, task
            self.manager.begin()
            await self._acquire(task)
            self._open = True
        return StepResult(observation=task.prompt if task else "")

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        if not self._open:
            raise Conflict("the env is closed", remedy="call reset first")
        if self._over:
            return invalid_call("The episode is over.")
        try:
            result = await self.manager.call(tool_name, arguments)
        except GuestError as error:
            return invalid_call(f"{tool_name}: {error}")
        self._over = result.done
        return result

    async def close(self) -> None:
        async with self._lock:
            self._open = False
            await self._release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def render(self, execution: Execution) -> StepResult:
        """What the policy reads of something that ran."""
        return render_execution(execution, self.observation_limit)

    @abstractmethod
    async def _acquire(self, task: Task | None) -> None:
        """Make what an episode needs; on failure nothing is left."""

    @abstractmethod
    async def _release(self) -> None:
        """Give it back. Idempotent; never raises for what the lease or a lifetime will clean up."""
