"""What the games share: a seed, a first observation, a reward when the episode ends."""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import replace

from sandyard.envs.base import Execution, StepResult
from sandyard.envs.observation import cut_text
from sandyard.envs.toolenv import ToolEnv
from sandyard.errors import BadRequest, Unsupported
from sandyard.tasks.base import Task


class GameEnv(ToolEnv):
    """A game in this process. `Task.metadata["seed"]`, an integer, fixes the episode; without one it is random.

    The task's prompt, if it has one, stands before the first observation. The reward comes with the
    step that ends the episode and is in [-1, 1]; before that it is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random()

    async def reset(self, task: Task | None = None) -> StepResult:
        """Begin an episode. Raises `BadRequest` for a seed that is not an integer."""
        result = await super().reset(task)
        text = "\n".join(part for part in (result.observation, self.opening()) if part)
        return replace(result, observation=cut_text(text, self.observation_limit))

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Always raises `Unsupported`: a game runs no programs."""
        raise Unsupported(f"{type(self).__name__} runs no programs", remedy="use a code env")

    @abstractmethod
    def deal(self) -> None:
        """Set up an episode with `self.random`."""

    @abstractmethod
    def opening(self) -> str:
        """What the policy reads first."""

    async def _acquire(self, task: Task | None) -> None:
        seed = task.metadata.get("seed") if task else None
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise BadRequest(f"the seed must be an integer, not {seed!r:.100}", field="seed")
        self.random = random.Random(seed)
        self.deal()

    async def _release(self) -> None:
        """Nothing is held."""
