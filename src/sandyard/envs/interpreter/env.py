"""The code env over the interpreter: `run_python` keeps its names through an episode."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sandyard.envs.base import Execution, StepResult, StepStatus
from sandyard.envs.code import RUN_PYTHON, SUBMIT_SOLUTION
from sandyard.envs.interpreter.executor import Interpreter
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.envs.interpreter.result import InterpreterResult
from sandyard.envs.observation import DEFAULT_LIMIT, cut_text
from sandyard.envs.toolenv import ToolEnv
from sandyard.tasks.base import Task

_EXIT_CODES = {StepStatus.OK: 0, StepStatus.TASK_FAILED: 1}


class InterpreterCodeEnv(ToolEnv):
    """`run_python` and `submit_solution`; one worker process for all its episodes, a session for each."""

    def __init__(
        self,
        *,
        run_timeout: float = 10.0,
        observation_limit: int = DEFAULT_LIMIT,
        imports: Collection[str] = DEFAULT_IMPORTS,
    ) -> None:
        super().__init__(observation_limit=observation_limit)
        self._interpreter = Interpreter(imports=imports, time_limit=run_timeout)
        self.register_tool(RUN_PYTHON, lambda env, arguments: self._run(arguments), own_limit=run_timeout)
        self.register_tool(SUBMIT_SOLUTION, lambda env, arguments: self.submit(arguments["code"]))

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Raw access. What is unsupported or was stopped has no exit code; `stderr` says why."""
        result = await self._interpreter.run(code, timeout=timeout)
        timed_out = result.status is StepStatus.TIMEOUT
        return Execution(result.stdout, result.error, _EXIT_CODES.get(result.status), timed_out, result.duration)

    async def close(self) -> None:
        await super().close()
        await self._interpreter.close()

    async def _run(self, arguments: Mapping[str, Any]) -> StepResult:
        result = await self._interpreter.run(arguments["code"])
        text = cut_text(result.stdout.rstrip("\n"), max(0, self.observation_limit - len(result.error) - 80))
        observation = "\n".join(part for part in (text, *_ending(result)) if part) or "(no output)"
        info = {"duration": result.duration, "state_lost": result.state_lost}
        return StepResult(observation=observation[: self.observation_limit], status=result.status, info=info)

    async def _acquire(self, task: Task | None) -> None:
        await self._interpreter.reset()

    async def _release(self) -> None:
        """The worker is kept for the next episode; `close` ends it."""


def _ending(result: InterpreterResult) -> tuple[str, ...]:
    lost = "[all names of earlier runs are gone]" if result.state_lost else ""
    return (f"[{result.error}]" if result.status is StepStatus.TIMEOUT else result.error, lost)
