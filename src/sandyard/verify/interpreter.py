"""The verifier of code tasks on the back end `interpreter`: a number that CPython would give, or none."""

from __future__ import annotations

from collections.abc import Collection

from sandyard.envs.base import Execution
from sandyard.envs.interpreter.executor import worker_command, worker_environment
from sandyard.envs.interpreter.guard import check
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS
from sandyard.errors import Unsupported
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, Verdict
from sandyard.verify.code import CodeVerifier, RunnerLauncher
from sandyard.verify.local import run_process
from sandyard.verify.program import RunnerLimits

INTERPRETER_LIMITS = RunnerLimits(cpu_timeout=20, memory_mb=1024)
_ADVICE = "score it on back end 'process' or 'sandbox'"
_ENDED = "the solution's process ended"


class InterpreterLauncher(RunnerLauncher):
    """Runs the runner whose box is the interpreter, as a process of this machine. NOT a sandbox."""

    uid_base = 0
    require_root = False

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        return await run_process(
            worker_command("sandyard.verify.interpreted"), stdin, timeout, environment=worker_environment()
        )


class InterpreterVerifier(CodeVerifier):
    """Scores what the interpreter executes as CPython does.

    `verify` raises `Unsupported` for everything else: what the guard refuses, what shows only while the
    solution runs, and a solution that is not done in time, since CPython might be.
    """

    def __init__(
        self, *, limits: RunnerLimits = INTERPRETER_LIMITS, imports: Collection[str] = DEFAULT_IMPORTS
    ) -> None:
        super().__init__(InterpreterLauncher(), limits=limits)
        self._imports = frozenset(imports)

    async def verify(self, task: Task, solution: str | None) -> Verdict:
        for source in (task.setup_code, solution or ""):
            refusal = check(source, imports=self._imports)
            if refusal is not None:
                raise Unsupported(f"task {task.task_id}: {refusal}")
        verdict = await super().verify(task, solution)
        for result in verdict.results:
            what = f"task {task.task_id}: test {result.index}"
            if result.outcome is TestOutcome.TIMEOUT:
                raise Unsupported(f"{what}: too slow in the interpreter", remedy=_ADVICE)
            if result.outcome is TestOutcome.CRASHED and result.detail.startswith(_ENDED):
                raise Unsupported(f"{what}: what the interpreter executes otherwise than CPython", remedy=_ADVICE)
        return verdict
