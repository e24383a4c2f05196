"""Our envs and tools as twinkle takes them: an `Env` by its methods, and a tool manager for its rollouts.

twinkle has no word for a rollout that must not be scored: a reward of NaN would poison its group. Here an
infrastructure failure ends the episode, keeps what was earned, and is named in `failed` and in
`info["status"]`; `evaluate` refuses to score it. Leave such trajectories out of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from sandyard.envs.base import Env, StepResult, StepStatus
from sandyard.envs.interop.episode import Rollout
from sandyard.envs.loop import LoopThread
from sandyard.envs.sync import Scorer
from sandyard.envs.tools import EnvTool, ToolManager
from sandyard.errors import SandboxError
from sandyard.tasks.base import Task

MakeTask = Callable[[Mapping[str, Any] | None], Task | None]


@dataclass
class TwinkleResult:
    """twinkle's `StepResult`, by its fields. `info` has `status` and `episode_reward`, the sum so far."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


def no_task(trajectory: Mapping[str, Any] | None) -> Task | None:
    return None


class TwinkleEnv:
    """`reset / step / tools / evaluate / close` around one env; many may share a `loop`.

    `make_task` makes the task of a trajectory. The reward is `score(task, submission)`, else what the env gave.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        *,
        score: Scorer | None = None,
        make_task: MakeTask = no_task,
        step_timeout: float = 120.0,
        loop: LoopThread | None = None,
    ) -> None:
        self._own_loop = loop is None
        self._loop = loop or LoopThread("sandyard-twinkle")
        self._make_task = make_task
        try:
            self._rollout = Rollout(make_env, self._loop, score, step_timeout)
        except BaseException:
            self._end_loop()
            raise

    def reset(self, trajectory: Mapping[str, Any] | None = None) -> TwinkleResult:
        return self._result(self._rollout.reset(self._make_task(trajectory)))

    def step(self, tool_name: str, arguments: Mapping[str, Any] | None = None) -> TwinkleResult:
        return self._result(self._rollout.step(tool_name, arguments or {}))

    def tools(self) -> list[dict[str, Any]]:
        return self._rollout.env.tools()

    @property
    def failed(self) -> str | None:
        """Why the episode must not be scored, if so."""
        return self._rollout.failed

    @property
    def done(self) -> bool:
        return self._rollout.env.ledger.done or self.failed is not None

    @property
    def episode_reward(self) -> float:
        return self._rollout.env.ledger.reward or 0.0

    def evaluate(self, trajectories: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[float]:
        """The episode's reward, for each of `trajectories`. Raises `SandboxError` for an episode without one."""
        score = self._rollout.score()
        if score is None:
            raise SandboxError(f"the episode has no reward: {self.failed}", remedy="leave it out of its group")
        return [score] * len(trajectories)

    def close(self) -> None:
        """Idempotent."""
        try:
            self._rollout.close()
        finally:
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_loop(self) -> None:
        if self._own_loop:
            self._loop.close()

    def _result(self, result: StepResult) -> TwinkleResult:
        info = {**result.info, "status": str(result.status), "episode_reward": self.episode_reward}
        if self.failed is not None:
            info["error"] = self.failed
        reward = 0.0 if result.reward is None or result.status is StepStatus.INFRA_ERROR else result.reward
        return TwinkleResult(result.observation, reward, result.done, info)


class TwinkleToolManager:
    """Our `ToolManager` for a twinkle rollout: `manager(tool_call)` is the observation's text.

    Infrastructure failures come out as exceptions, which twinkle's own manager would show to the policy.
    """

    def __init__(self, tools: ToolManager, loop: LoopThread) -> None:
        self.tools = tools
        self._loop = loop

    def __call__(self, tool_call: Mapping[str, Any]) -> str:
        return self._loop.run(self.tools(tool_call)).observation

    def register(self, tool: EnvTool) -> None:
        self.tools.register(tool)

    def unregister(self, name: str) -> EnvTool | None:
        return self.tools.unregister(name)

    def names(self) -> list[str]:
        return self.tools.names()

    def tool_infos(self) -> list[dict[str, Any]]:
        return self.tools.tool_infos()

    def copy(self) -> TwinkleToolManager:
        return TwinkleToolManager(self.tools.copy(), self._loop)

    @property
    def done(self) -> bool:
        return self.tools.done

    @property
    def episode_reward(self) -> float:
        return self.tools.episode_reward or 0.0
