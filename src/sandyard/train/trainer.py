"""The GRPO loop: play, score, compare within groups, learn; and stop loudly when that makes no sense."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandyard.envs.base import Env
from sandyard.errors import CapacityError, ConfigError, SandyardError
from sandyard.tasks.base import Task
from sandyard.train.advantages import Advantages, group_advantages
from sandyard.train.batching import Sample
from sandyard.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from sandyard.train.config import TrainConfig
from sandyard.train.episode import BuildMessages
from sandyard.train.evaluate import EvalResult, evaluate
from sandyard.train.metrics import NAMES, Metrics, rollout_metrics
from sandyard.train.policies.base import Policy
from sandyard.train.reference import freeze_reference
from sandyard.train.rollout import RolloutEngine
from sandyard.train.runlog import RunLog
from sandyard.train.seeds import derive_seed, task_order
from sandyard.train.trajectory import Trajectory
from sandyard.train.update import Updater
from sandyard.verify.base import Verdict, Verifier
from sandyard.verify.shaping import shape_reward

_WINDOW = 3  # batches over which the infrastructure's failure rate is taken


class TrainingStopped(SandyardError):
    """The run cannot go on to a useful end; the message says why, with counts."""


@dataclass(frozen=True, slots=True)
class TrainEvent:
    """What happened: kind "rollout" (one trajectory is complete), "step" (metrics of a step), "skip" (no
    update, with `message`), "checkpoint" (message: its path), "evaluation" (one is complete)."""

    kind: str
    step: int
    message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    trajectory: Trajectory | None = None


class GRPOTrainer:
    """Trains `policy` on `tasks`, played in envs from `make_env` and scored by `verifier` (None: by the envs).

    `build_messages` makes a task's conversation (`episode.system_and_user`). `run_dir` receives
    `config.json`, `metrics.jsonl`, `trajectories.jsonl` and `checkpoints/`. `capacity` tells how many
    sandboxes there is room for; a batch that exceeds it is refused before the first rollout. The same
    seed gives the same order of tasks. The caller owns policy and verifier, and closes them.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        make_env: Callable[[], Env],
        verifier: Verifier | None,
        config: TrainConfig,
        *,
        build_messages: BuildMessages,
        run_dir: Path,
        capacity: Callable[[], int] | None = None,
        reward: Callable[[Verdict], float] = shape_reward,
        on_event: Callable[[TrainEvent], None] | None = None,
    ) -> None:
        if not tasks:
            raise ConfigError("there are no tasks to train on")
        self.policy = policy
        self.tasks = list(tasks)
        self.config = config
        self.run_dir = run_dir
        self.step = 0
        self._taken = 0
        self._capacity = capacity
        self._on_event = on_event
        self._runlog = RunLog(run_dir, getattr(policy, "decode", None))
        self._updates = 0
        self._saved = -1
        self._skipped: list[str] = []
        self._failures: deque[Counter[str]] = deque(maxlen=_WINDOW)
        self._engine = RolloutEngine(
            policy,
            make_env,
            verifier,
            build_messages,
            config.rollout(),
            reward=reward,
            on_trajectory=lambda trajectory: self._emit("rollout", trajectory=trajectory),
        )
        reference = freeze_reference(policy, config.temperature) if config.beta > 0 else None
        self._updater = Updater(policy, config, reference)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint (or the newest in a directory). Raises `ConfigError` if it is of another
        model, task set or seed."""
        progress = load_checkpoint(path, self.policy, self._updater.optimizer)
        if progress.tasks != [task.task_id for task in self.tasks]:
            raise ConfigError(f"checkpoint {path} was made on other tasks")
        if progress.seed != self.config.seed:
            raise ConfigError(f"checkpoint {path} was made with seed {progress.seed}, not {self.config.seed}")
        for group in self._updater.optimizer.param_groups:
            # What was asked for now, not what the checkpoint's run was asked for.
            group |= {"lr": self.config.learning_rate, "weight_decay": self.config.weight_decay}
        self.step, self._taken = progress.step, progress.tasks_taken

    def check_capacity(self) -> None:
        """Raise `CapacityError` if the batch would not fit."""
        wanted = self.config.rollouts
        if self.config.env_concurrency:
            wanted = min(wanted, self.config.env_concurrency)
        room = self._capacity() if self._capacity is not None else wanted
        if room < wanted:
            raise CapacityError(
                f"a batch of {self.config.batch_size} x {self.config.num_generations} needs {wanted} sandboxes, "
                f"there is room for {room}",
                remedy="lower --batch-size, --num-generations or ENV_CONCURRENCY, or add capacity",
            )

    async def train(self) -> None:
        """Run up to `max_steps`. Raises `TrainingStopped`, and `CapacityError` before anything was done."""
        self.check_capacity()
        self._runlog.begin(self.config.to_json(), self.step)
        try:
            while self.step < self.config.max_steps:
                await self._one_step()
                if self.config.save_steps and self.step % self.config.save_steps == 0:
                    self.save()
            self._check_learned()
        finally:
            # Also of a run that stops: what was learned so far is not lost.
            if self._updates and self._saved != self.step:
                self.save()

    async def evaluate(
        self, tasks: Sequence[Task], *, samples: int = 4, temperature: float = 1.0, label: str = "eval"
    ) -> EvalResult:
        """Pass@1 on `tasks`; the rollouts go to `LABEL.jsonl` of the run. Raises `TrainingStopped` if more of
        them were lost to the infrastructure than a run may lose: what is left measures nothing."""
        seed = derive_seed("eval", self.config.seed)
        result = await evaluate(self._engine, tasks, samples=samples, temperature=temperature, seed=seed)
        self._runlog.trajectories(result.trajectories, f"{label}.jsonl")
        lost = Counter(result.masked)
        if lost.total() > self.config.max_infra_failure_rate * len(result.trajectories):
            raise TrainingStopped(
                f"evaluation {label!r}: {lost.total()} of {len(result.trajectories)} rollouts were lost to the "
                f"infrastructure ({_counts(lost)}; the last said: {_last_detail(result.trajectories)})"
            )
        self._emit("evaluation", message=label, metrics={"pass_at_1": result.pass_at_1})
        return result

    def save(self) -> Path:
        """Write a checkpoint now."""
        progress = Progress(self.step, self._taken, self.config.seed, [task.task_id for task in self.tasks])
        optimizer, keep = self._updater.optimizer, self.config.keep_checkpoints
        path = save_checkpoint(self.run_dir / "checkpoints", self.policy, optimizer, progress, keep)
        self._saved = self.step
        self._emit("checkpoint", message=str(path))
        return path

    async def _one_step(self) -> None:
        started = time.perf_counter()
        step = self.step + 1
        seed = derive_seed("rollouts", self.config.seed, step)
        trajectories = await self._engine.run(self._next_tasks(), self.config.num_generations, seed=seed)
        rolled = time.perf_counter()
        advantages = group_advantages(
            [t.reward for t in trajectories],
            self.config.num_generations,
            self.config.scale,
            keys=[(t.group, t.task_id) for t in trajectories],
        )
        metrics = rollout_metrics(trajectories, advantages.degenerate)
        self._runlog.trajectories(trajectories, step=step)
        skip = self._why_skip(trajectories, advantages)
        try:
            if skip is None:
                metrics |= await self._learn(trajectories, advantages, step)
        finally:
            # Together and only here: a checkpoint after an interruption repeats no task and loses none.
            self.step, self._taken = step, self._taken + self.config.batch_size
        done = time.perf_counter()
        metrics |= {"time/rollout": rolled - started, "time/train": done - rolled, "time/sync": 0.0}
        self._record(metrics, skip)
        self._check_health(trajectories, skip)

    def _next_tasks(self) -> list[Task]:
        order = task_order(len(self.tasks), self.config.seed, self._taken)
        return [self.tasks[next(order)] for _ in range(self.config.batch_size)]

    def _why_skip(self, trajectories: Sequence[Trajectory], advantages: Advantages) -> str | None:
        scored = sum(t.reward is not None for t in trajectories)
        if not scored:
            reasons = Counter(str(t.masked) for t in trajectories)
            return f"all {len(trajectories)} rollouts are masked ({_counts(reasons)})"
        if not any(t.token_ids for t in trajectories if t.reward is not None):
            return f"none of {scored} scored rollouts holds a token"
        if not any(advantages.values) and self.config.beta == 0:
            masked = len(trajectories) - scored
            return f"all {advantages.degenerate} groups are without a contrast ({masked} rollouts masked)"
        return None

    async def _learn(self, trajectories: Sequence[Trajectory], advantages: Advantages, step: int) -> Metrics:
        pairs = zip(trajectories, advantages.values, strict=True)
        samples = [Sample(t, value) for t, value in pairs if t.reward is not None and t.token_ids]
        # In a thread: leases must be renewed and progress shown while the gradient is computed. To its end
        # even when cancelled: nobody may save weights that are half updated.
        update = asyncio.create_task(asyncio.to_thread(self._updater.update, samples, step))
        try:
            metrics = await asyncio.shield(update)
        except asyncio.CancelledError:
            await asyncio.wait([update])
            raise
        finally:
            self._updates += 1
        return metrics

    def _record(self, metrics: Metrics, skip: str | None) -> None:
        line: dict[str, Any] = {"step": self.step, **dict.fromkeys(NAMES), **metrics}
        if skip is not None:
            line["skipped"] = skip
        self._runlog.metrics(line)
        if skip is not None:
            self._emit("skip", message=skip, metrics=metrics)
        else:
            self._emit("step", metrics=metrics)

    def _check_health(self, trajectories: Sequence[Trajectory], skip: str | None) -> None:
        # Everything solved is nothing to learn, but nothing to complain about either.
        solved = bool(trajectories) and all(t.solved for t in trajectories)
        if skip is None or solved:
            self._skipped = []
        else:
            self._skipped.append(f"step {self.step}: {skip}")
        self._failures.append(Counter(t.masked or "" for t in trajectories))
        rate, reasons = self._failure_rate()
        if len(self._failures) == _WINDOW and rate > self.config.max_infra_failure_rate:
            raise TrainingStopped(
                f"{reasons.total()} rollouts of the last {_WINDOW} steps were lost to the infrastructure "
                f"({_counts(reasons)}), more than {self.config.max_infra_failure_rate:.0%}; the last said: "
                f"{_last_detail(trajectories)}"
            )
        if len(self._skipped) >= self.config.max_skipped:
            raise TrainingStopped(f"{len(self._skipped)} steps in a row learned nothing: {'; '.join(self._skipped)}")

    def _check_learned(self) -> None:
        """A run that is too short for the window must still not end well if all of it was lost."""
        rate, reasons = self._failure_rate()
        if self._failures and not self._updates and rate == 1.0:
            raise TrainingStopped(f"every rollout was lost to the infrastructure ({_counts(reasons)})")

    def _failure_rate(self) -> tuple[float, Counter[str]]:
        """Share of masked rollouts in the window, and their reasons."""
        total: Counter[str] = sum(self._failures, Counter())
        reasons = Counter({reason: count for reason, count in total.items() if reason})
        return reasons.total() / max(1, total.total()), reasons

    def _emit(
        self,
        kind: str,
        *,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        trajectory: Trajectory | None = None,
    ) -> None:
        if self._on_event is not None:
            self._on_event(TrainEvent(kind, self.step, message, metrics or {}, trajectory))


def _last_detail(trajectories: Sequence[Trajectory]) -> str:
    details = [trajectory.detail for trajectory in trajectories if trajectory.detail]
    return " ".join(details[-1].split())[:300] if details else "nothing"


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
