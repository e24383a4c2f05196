"""One rollout in an env for a trainer that is synchronous and knows nothing of failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sandyard.envs.base import Env, StepResult, StepStatus
from sandyard.envs.loop import LoopThread
from sandyard.envs.sync import Scorer, SyncEnv
from sandyard.errors import ConfigError, is_infrastructure
from sandyard.tasks.base import Task

logger = logging.getLogger(__name__)
_ATTEMPTS = 2  # resets on a fresh env: nothing of the episode was seen yet


class Rollout:
    """Episodes one after another, each accounted for. What fails is an answer here, never an exception:

    a failure of the infrastructure leaves the episode without a score (`score` is None); the caller's mistake
    and a fault of the program are kept, and raised by `score`, where a trainer that turns an exception of a
    tool into text for the policy does not.
    """

    def __init__(self, make_env: Callable[[], Env], loop: LoopThread, scorer: Scorer | None, step_timeout: float):
        self._make_env = make_env
        self._loop = loop
        self._scorer = scorer
        self._step_timeout = step_timeout
        self._env = self._make()
        self._fault: Exception | None = None

    @property
    def env(self) -> SyncEnv:
        return self._env

    def reset(self, task: Task | None) -> StepResult:
        """Raises the caller's mistakes."""
        self._fault = None
        error: Exception
        for _ in range(_ATTEMPTS):
            try:
                result = self._env.reset(task, timeout=self._step_timeout)
                if result.status is not StepStatus.INFRA_ERROR:
                    return result
                error = RuntimeError(result.observation)
            except Exception as failure:
                if not is_infrastructure(failure):
                    raise
                error = failure
            self._replace()
        self._env.ledger.fail(str(error))
        return self._lost()

    def step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        ledger = self._env.ledger
        if ledger.failed is not None:
            return self._lost()
        if ledger.done:
            return StepResult("The episode is over.", status=StepStatus.INVALID_CALL)
        try:
            result = self._env.step(name, arguments, timeout=self._step_timeout)
            return self._lost() if ledger.failed is not None else result
        except Exception as error:  # noqa: BLE001 - kept for `score`
            if not is_infrastructure(error):
                self._fault = error
            ledger.fail(f"{type(error).__name__}: {error}")
            return self._lost()

    @property
    def failed(self) -> str | None:
        """Why the episode has no score."""
        return self._env.ledger.failed

    def score(self) -> float | None:
        """The scorer's reward for what was submitted, else what the env gave; None where the infrastructure
        failed. Raises a fault that a step met."""
        if self._fault is not None:
            raise self._fault
        ledger = self._env.ledger
        if ledger.failed is not None or self._scorer is None:
            return ledger.score
        try:
            return self._env.evaluate()
        except Exception as error:
            if not is_infrastructure(error):
                raise
            ledger.fail(f"{type(error).__name__}: {error}")
            return None

    def close(self) -> None:
        self._env.close(timeout=self._step_timeout)

    def _make(self) -> SyncEnv:
        env = self._make_env()
        for name, limit in env.time_limits().items():
            if limit >= self._step_timeout:
                raise ConfigError(
                    f"tool {name} may run {limit:g} s, which must be below step_timeout ({self._step_timeout:g} s)"
                )
        return SyncEnv(env, self._scorer, loop=self._loop)

    def _replace(self) -> None:
        """Nobody knows in what state the failure left the env."""
        broken, self._env = self._env, self._make()
        try:
            broken.close(timeout=self._step_timeout)
        except Exception as error:  # noqa: BLE001 - what is broken may not close, either: its lifetime ends it
            logger.warning("closing an env after a failure failed: %s", error)

    def _lost(self) -> StepResult:
        text = f"The environment failed; this episode is not scored. ({self._env.ledger.failed})"
        return StepResult(text, truncated=True, status=StepStatus.INFRA_ERROR)
