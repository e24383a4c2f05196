"""Our envs in TRL's `GRPOTrainer`: `environment_factory=`, and `tools=` for tools without an episode.

An infrastructure failure is never reward 0: `get_reward` answers None, which TRL makes NaN, leaves out of the
group's baseline and gives the advantage 0. TRL shows an exception of a tool to the policy as text and
goes on; here a fault of the program is raised by `get_reward`, where TRL does not catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from sandyard.envs.base import Env, ToolSpec
from sandyard.envs.interop.episode import Rollout
from sandyard.envs.interop.functions import as_function
from sandyard.envs.loop import LoopThread
from sandyard.envs.sync import Scorer, SyncEnv
from sandyard.errors import BadRequest
from sandyard.tasks.base import Task

_RESERVED = ("reset", "get_reward")
MakeTask = Callable[[Mapping[str, Any]], Task]


def row_task(row: Mapping[str, Any]) -> Task:
    """The task of a row of the data set: its `task_id`, `test_list`, `test_setup_code` and `seed`, as far as it
    has them. The prompt is TRL's to show. Rows of games want a `seed`: the rollouts of a row then start alike."""
    metadata = {"seed": row["seed"]} if row.get("seed") is not None else {}
    return Task(
        task_id=str(row.get("task_id") or ""),
        prompt="",
        tests=tuple(row.get("test_list") or ()),
        setup_code=str(row.get("test_setup_code") or ""),
        metadata=metadata,
    )


class _Environment:
    """What TRL holds for a rollout. Subclasses have the env's tools as methods."""

    def __init__(self, rollout: Rollout, make_task: MakeTask) -> None:
        self._rollout = rollout
        self._make_task = make_task

    def reset(self, **row: Any) -> str | None:
        """The env's first observation, for the end of the prompt."""
        return self._rollout.reset(self._make_task(row)).observation or None

    def get_reward(self) -> float | None:
        return self._rollout.score()


class TrlEnvironments:
    """`with TrlEnvironments(make_env) as factory: GRPOTrainer(..., environment_factory=factory)`.

    Each environment that TRL asks for has an env of its own, reset for each of its rollouts; TRL closes none,
    leaving the context does. The reward is that of `score(task, submission)`, else what the env gave.
    `step_timeout` bounds every call (seconds). Raises `BadRequest` for tools that cannot be methods, and
    `ConfigError` for a tool that may run past `step_timeout`.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        *,
        score: Scorer | None = None,
        make_task: MakeTask = row_task,
        step_timeout: float = 120.0,
    ) -> None:
        self._make_env = make_env
        self._score = score
        self._make_task = make_task
        self._step_timeout = step_timeout
        self._loop = LoopThread("sandyard-trl")
        self._kind: type[_Environment] | None = None
        self._rollouts: list[Rollout] = []

    def __call__(self) -> Any:
        """One more environment, with the env's tools as methods. All are of one class, named after the env's."""
        rollout = Rollout(self._make_env, self._loop, self._score, self._step_timeout)
        self._rollouts.append(rollout)
        if self._kind is None:
            self._kind = _with_tools(type(rollout.env.env).__name__, rollout.env.env.tools())
        return self._kind(rollout, self._make_task)

    def close(self) -> None:
        """Close all envs; idempotent. Raises the first error, after the last env."""
        errors: list[Exception] = []
        rollouts, self._rollouts = self._rollouts, []
        for rollout in rollouts:
            try:
                rollout.close()
            except Exception as error:  # noqa: BLE001 - raised below, when the others are closed
                errors.append(error)
        self._loop.close()
        if errors:
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_tools(name: str, specs: Any) -> type[_Environment]:
    methods: dict[str, Any] = {}
    for spec in specs:
        if spec.name in _RESERVED or spec.name.startswith("_"):
            raise BadRequest(f"tool {spec.name}: TRL has its own use for that name", remedy="rename it")
        methods[spec.name] = as_function(spec, _stepper(spec.name), method=True)
    return type(name, (_Environment,), methods)


def _stepper(name: str) -> Callable[..., str]:
    def step(environment: _Environment, **arguments: Any) -> str:
        return environment._rollout.step(name, arguments).observation

    return step


def tool_functions(env: SyncEnv) -> list[Callable[..., str]]:
    """The tools of `env` as functions for `tools=`. All rollouts share the env, which is reset and closed by its
    owner: only for tools that keep nothing, such as a fresh process for every program."""

    def function(spec: ToolSpec) -> Callable[..., str]:
        return as_function(spec, lambda **arguments: env.step(spec.name, arguments).observation)

    return [function(spec) for spec in env.env.tools()]
