"""A synchronous face of an env, for code that expects `reset / step / tools / evaluate / close`.

The one core is async; here every call is run on a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from sandyard.envs.base import Env, Execution, StepResult
from sandyard.errors import Conflict
from sandyard.tasks.base import Task

T = TypeVar("T")
Scorer = Callable[[Task, str | None], Coroutine[Any, Any, float]]
_JOIN_TIMEOUT = 30.0


class SyncEnv:
    """Wraps `env`. Calls come from any thread but not from a coroutine of the caller's own loop.

    `evaluate` needs a `score(task, submission)`, such as `functools.partial(verify.shaping.score,
    verifier)`. `close` ends the thread; nothing can be done afterwards.
    """

    def __init__(self, env: Env, score: Scorer | None = None) -> None:
        self.env = env
        self._score = score
        self._task: Task | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandyard-sync-env", daemon=True)
        self._thread.start()

    def reset(self, task: Task | None = None) -> StepResult:
        self._task = task
        return self._run(self.env.reset(task))

    def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        return self._run(self.env.step(tool_name, arguments))

    def tools(self) -> list[dict[str, Any]]:
        """The `tools=` argument of a chat template."""
        return [spec.to_openai() for spec in self.env.tools()]

    def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        return self._run(self.env.execute(code, timeout=timeout))

    @property
    def submission(self) -> str | None:
        return self.env.submission

    def evaluate(self, trajectories: object = None, **kwargs: Any) -> float:
        """The reward of what was submitted for the task of the last reset. The arguments are
        twinkle's and not needed. Raises `Conflict` without a scorer or a task."""
        if self._score is None or self._task is None:
            raise Conflict("nothing to evaluate", remedy="give a scorer, and reset with a task")
        return self._run(self._score(self._task, self.env.submission))

    def close(self) -> None:
        """Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self._run(self.env.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_TIMEOUT)
            if not self._thread.is_alive():
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise Conflict("the env is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
