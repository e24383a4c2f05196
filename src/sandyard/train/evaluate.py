"""Evaluation: the same rollouts and the same scoring as in training, without learning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sandyard.tasks.base import Task
from sandyard.train.rollout import RolloutEngine
from sandyard.train.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class FamilyScore:
    """`scored` rollouts of `tasks` tasks, of which `solved` passed all tests."""

    tasks: int
    scored: int
    solved: int

    @property
    def pass_at_1(self) -> float:
        """Mean over samples; NaN if none was scored."""
        return self.solved / self.scored if self.scored else float("nan")


@dataclass(frozen=True, slots=True)
class EvalResult:
    """`masked` counts, by reason, the rollouts that say nothing about the policy."""

    samples: int
    temperature: float
    total: FamilyScore
    families: dict[str, FamilyScore]
    mean_reward: float
    masked: dict[str, int] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def pass_at_1(self) -> float:
        return self.total.pass_at_1

    def to_json(self) -> dict[str, Any]:
        """Everything but the trajectories."""
        return {
            "samples": self.samples,
            "temperature": self.temperature,
            "pass_at_1": self.pass_at_1,
            "mean_reward": self.mean_reward,
            "tasks": self.total.tasks,
            "scored": self.total.scored,
            "solved": self.total.solved,
            "masked": self.masked,
            "families": {
                name: {"tasks": s.tasks, "scored": s.scored, "solved": s.solved, "pass_at_1": s.pass_at_1}
                for name, s in self.families.items()
            },
        }


async def evaluate(
    engine: RolloutEngine, tasks: Sequence[Task], *, samples: int = 4, temperature: float = 1.0, seed: int = 0
) -> EvalResult:
    """Pass@1 of the engine's policy on `tasks`: the mean over `samples` rollouts each (greedy: temperature 0,
    one sample says it all)."""
    if temperature == 0:
        samples = 1
    trajectories = await engine.run(tasks, samples, seed=seed, temperature=temperature)
    return summarize(trajectories, samples, temperature)


def summarize(trajectories: Sequence[Trajectory], samples: int, temperature: float) -> EvalResult:
    """The scores of rollouts already made."""
    names = sorted({trajectory.family for trajectory in trajectories})
    scored = [t.reward for t in trajectories if t.reward is not None]
    return EvalResult(
        samples=samples,
        temperature=temperature,
        total=_score(trajectories),
        families={name: _score([t for t in trajectories if t.family == name]) for name in names},
        mean_reward=sum(scored) / len(scored) if scored else float("nan"),
        masked=dict(Counter(t.masked for t in trajectories if t.masked is not None)),
        trajectories=list(trajectories),
    )


def _score(trajectories: Sequence[Trajectory]) -> FamilyScore:
    return FamilyScore(
        tasks=len({t.task_id for t in trajectories}),
        scored=sum(t.reward is not None for t in trajectories),
        solved=sum(t.solved for t in trajectories if t.reward is not None),
    )
