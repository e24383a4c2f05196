"""Many solutions through one verifier: what `sandyard eval` runs and reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import Boundary, SandyardError, TaskError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, Verdict, Verifier
from sandyard.verify.shaping import shape_reward


@dataclass(frozen=True, slots=True)
class Score:
    """One task's. `reward` is None when there is no verdict; `error` then says why and whose fault."""

    task: Task
    reward: float | None
    verdict: Verdict | None = None
    error: SandyardError | None = None

    @property
    def reason(self) -> str:
        """Why it is no 1.0, in a word: `failed`, `crashed`, `timeout`, `not submitted`, or the boundary."""
        if self.error is not None:
            return str(self.error.boundary)
        assert self.verdict is not None
        if not self.verdict.submitted:
            return "not submitted"
        worst = (r.outcome for r in self.verdict.results if r.outcome is not TestOutcome.PASSED)
        return str(next(worst, TestOutcome.PASSED))

    @property
    def detail(self) -> str:
        """The last traceback line of the first test that did not pass, or the error."""
        if self.error is not None:
            return str(self.error)
        results = self.verdict.results if self.verdict else ()
        return next((f"test {r.index}: {r.detail}" for r in results if r.outcome is not TestOutcome.PASSED), "")


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores in the order of the tasks. Infrastructure failures are not scored and stand apart."""

    scores: Sequence[Score]
    seconds: float

    @property
    def scored(self) -> Sequence[Score]:
        return [score for score in self.scores if score.reward is not None]

    @property
    def full(self) -> int:
        """How many scored 1.0."""
        return sum(score.reward == 1.0 for score in self.scores)

    @property
    def mean(self) -> float | None:
        """Mean reward of what was scored; None if nothing was."""
        rewards = [score.reward for score in self.scores if score.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def failures(self) -> Mapping[str, Sequence[Score]]:
        """What did not score 1.0 and is no infrastructure's fault, by reason: broken tasks too."""
        return self._by_reason(infrastructure=False)

    @property
    def infrastructure(self) -> Mapping[str, Sequence[Score]]:
        """What has no score through nobody's solution, by boundary."""
        return self._by_reason(infrastructure=True)

    def _by_reason(self, *, infrastructure: bool) -> Mapping[str, Sequence[Score]]:
        groups: dict[str, list[Score]] = defaultdict(list)
        for score in self.scores:
            broken = score.error is not None and score.error.boundary is not Boundary.TASK
            if score.reward != 1.0 and broken is infrastructure:
                groups[score.reason].append(score)
        return dict(groups)

    def lines(self, shown: int = 20) -> list[str]:
        """The report as text: counts, then failures by reason, `shown` of each."""
        mean = "none" if self.mean is None else f"{self.mean:.4f}"
        rate = f"{self.seconds:.1f} s, {1000 * self.seconds / max(1, len(self.scores)):.0f} ms a task"
        out = [
            f"{self.full} of {len(self.scores)} score 1.0; mean reward {mean} over {len(self.scored)} scored; {rate}"
        ]
        for title, groups in (("", self.failures), ("not scored, infrastructure: ", self.infrastructure)):
            for reason, scores in sorted(groups.items()):
                out.append(f"{title}{reason}: {len(scores)}")
                out += [f"  {score.task.task_id}  {score.detail}" for score in scores[:shown]]
                out += [f"  … and {len(scores) - shown} more"] if len(scores) > shown else []
        return out

    def to_dict(self) -> dict[str, object]:
        """For JSON: totals, and one entry a task."""
        tasks = [
            {"task_id": s.task.task_id, "reward": s.reward, "reason": s.reason, "detail": s.detail} for s in self.scores
        ]
        return {
            "tasks": len(self.scores),
            "full": self.full,
            "scored": len(self.scored),
            "mean": self.mean,
            "seconds": self.seconds,
            "scores": tasks,
        }


def load_solutions(tasks: Sequence[Task], solutions: str | Path) -> dict[str, str | None]:
    """Solutions by task id: `reference`, `pass` (that very program), or a JSONL file of
    `{"task_id", "solution"}`, where a task that is not in it counts as not submitted.

    Raises `TaskError` naming what is missing or, for a file, the line.
    """
    if solutions == "pass":
        return {task.task_id: "pass" for task in tasks}
    if solutions == "reference":
        for task in tasks:
            if task.reference is None:
                raise TaskError(f"task {task.task_id} has no reference solution")
        return {task.task_id: task.reference for task in tasks}
    return _read_solutions({task.task_id: None for task in tasks}, Path(solutions))


def _read_solutions(found: dict[str, str | None], path: Path) -> dict[str, str | None]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"solutions {path}: {error}", remedy="say reference, pass or a JSONL file") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            task_id, solution = str(row["task_id"]), row["solution"]
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{path}, line {number}: task_id and solution are needed: {error}") from error
        if task_id not in found:
            raise TaskError(f"{path}, line {number}: field task_id: there is no task {task_id!r}")
        if not isinstance(solution, str):
            raise TaskError(f"{path}, line {number}: field solution: a text is needed")
        if found[task_id] is not None:
            raise TaskError(f"{path}, line {number}: field task_id: {task_id!r} has a solution already")
        found[task_id] = solution
    return found


async def evaluate_solutions(
    tasks: Sequence[Task],
    solutions: str | Path | Mapping[str, str | None],
    verifier: Verifier,
    *,
    concurrency: int = 4,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Verify every task's solution, `concurrency` at a time; `on_progress(done, total)` after each.

    One failure never ends the others. Raises `TaskError` for solutions that cannot be read.
    """
    chosen = solutions if isinstance(solutions, Mapping) else load_solutions(tasks, solutions)
    started, done = time.monotonic(), 0
    gate = asyncio.Semaphore(concurrency)

    async def score(task: Task) -> Score:
        nonlocal done
        async with gate:
            result = await _score(task, chosen.get(task.task_id), verifier)
        done += 1
        if on_progress is not None:
            on_progress(done, len(tasks))
        return result

    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(score(task)) for task in tasks]
    return EvalReport([job.result() for job in jobs], time.monotonic() - started)


async def _score(task: Task, solution: str | None, verifier: Verifier) -> Score:
    try:
        verdict = await verifier.verify(task, solution)
        return Score(task, shape_reward(verdict), verdict)
    except SandyardError as error:
        return Score(task, None, error=error)
