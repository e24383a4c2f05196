"""The code env over a session: `run_python` keeps its names through an episode, or each run is a fresh process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sandyard.envs.base import Execution, StepResult
from sandyard.envs.code import RUN_PYTHON, SUBMIT_SOLUTION
from sandyard.envs.observation import DEFAULT_LIMIT, render_session_run
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.result import ProcessResult
from sandyard.envs.process.session import ProcessSession
from sandyard.envs.process.shared import ServerShare
from sandyard.envs.toolenv import ToolEnv
from sandyard.errors import Conflict
from sandyard.tasks.base import Task

LOST = "[the session is over: all names and files of earlier runs are gone]"


class ProcessCodeEnv(ToolEnv):
    """`run_python` and `submit_solution`. Each episode is a session of its own; the fork server is shared by all
    envs of the loop. `persistent=False`: each run starts without names, and only files stay.

    Raises `HostError` in `reset` where the host does not let us confine, `ConfigError` for unknown `packages`.
    """

    def __init__(
        self,
        *,
        run_timeout: float = 10.0,
        observation_limit: int = DEFAULT_LIMIT,
        persistent: bool = True,
        limits: SessionLimits = SessionLimits(),
        packages: Sequence[str] = (),
    ) -> None:
        super().__init__(observation_limit=observation_limit)
        self.run_timeout = run_timeout
        self.persistent = persistent
        self._share = ServerShare(limits, packages)
        self._session: ProcessSession | None = None
        self.register_tool(RUN_PYTHON, lambda env, arguments: self._run_tool(arguments), own_limit=run_timeout)
        self.register_tool(SUBMIT_SOLUTION, lambda env, arguments: self.submit(arguments["code"]))

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Raw access, in the episode's session. A session that is over is replaced by a new one first."""
        return (await self._run(code, timeout)).execution

    async def close(self) -> None:
        await super().close()
        await self._share.release()

    async def _run(self, code: str, timeout: float | None = None) -> ProcessResult:
        session = self._session
        if session is None:
            raise Conflict("the env has no session", remedy="call reset first")
        if not session.alive:
            await session.restart()
        return await session.run(code, timeout or self.run_timeout, fresh=not self.persistent)

    async def _run_tool(self, arguments: Mapping[str, Any]) -> StepResult:
        result = await self._run(arguments["code"])
        execution = result.execution if not result.timed_out else replace(result.execution, stderr=result.stderr)
        return render_session_run(execution, self.observation_limit, LOST if result.state_lost else None)

    async def _acquire(self, task: Task | None) -> None:
        self._session = await self._share.acquire().open()

    async def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
