"""A synchronous face of an env, for code that expects `reset / step / tools / evaluate / close`.

The one core is async; here every call is run on a loop in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

from sandyard.envs.base import Env, Execution, StepResult
from sandyard.envs.ledger import Ledger
from sandyard.envs.loop import LoopThread
from sandyard.errors import Conflict
from sandyard.tasks.base import Task

T = TypeVar("T")
Scorer = Callable[[Task, str | None], Coroutine[Any, Any, float]]


class SyncEnv:
    """Wraps `env`. Calls come from any thread but not from a coroutine on `loop`, which many may share;
    without one it has its own.

    `evaluate` needs a `score(task, submission)`, such as `functools.partial(verify.shaping.score,
    verifier)`. `ledger` is the account of the episode since the last reset. After `close` nothing can be done.
    """

    def __init__(self, env: Env, score: Scorer | None = None, *, loop: LoopThread | None = None) -> None:
        self.env = env
        self.ledger = Ledger()
        self._score = score
        self._task: Task | None = None
        self._loop = loop or LoopThread("sandyard-sync-env")
        self._own_loop = loop is None
        self._closed = False

    def reset(self, task: Task | None = None, *, timeout: float | None = None) -> StepResult:
        """Raises `TimeoutError` after `timeout` seconds, too."""
        self._task = task
        self.ledger.begin()
        return self.ledger.record(self._run(self.env.reset(task), timeout))

    def step(self, tool_name: str, arguments: Mapping[str, Any], *, timeout: float | None = None) -> StepResult:
        """Raises `TimeoutError` after `timeout` seconds, too."""
        return self.ledger.record(self._run(self.env.step(tool_name, arguments), timeout))

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

    def close(self, *, timeout: float | None = None) -> None:
        """Idempotent. Raises `TimeoutError`, and what closing raised; the env is given up all the same."""
        if self._closed:
            return
        try:
            self._run(self.env.close(), timeout)
        finally:
            self._closed = True
            if self._own_loop:
                self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        if self._closed:
            work.close()
            raise Conflict("the env is closed")
        return self._loop.run(work, timeout)
