"""The rollout engine over envs that take 50 ms a call and a policy that takes no time: what is left is ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.measure import Figure, Report
from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.tasks.base import Task
from sandyard.train.episode import system_and_user
from sandyard.train.rollout import RolloutConfig, RolloutEngine
from sandyard.train.testing import ScriptedPolicy
from sandyard.verify.base import Verdict, Verifier

DELAY = 0.05  # seconds an env call takes
TRAJECTORIES = 64
RUN = '<tool_call>{"name": "run_python", "arguments": {"code": "print(1)"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit_solution", "arguments": {"code": "x = 1"}}</tool_call>'
TURNS = [RUN, RUN, RUN, SUBMIT]


class DelayEnv(Env):
    """Answers every call after `DELAY`."""

    def __init__(self) -> None:
        self._submission: str | None = None

    async def reset(self, task: Task | None = None) -> StepResult:
        await asyncio.sleep(DELAY)
        return StepResult()

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        await asyncio.sleep(DELAY)
        if tool_name == "submit_solution":
            self._submission = str(arguments["code"])
        return StepResult("1\n", terminated=tool_name == "submit_solution")

    def tools(self) -> Sequence[ToolSpec]:
        return [ToolSpec(name, name, {"type": "object"}) for name in ("run_python", "submit_solution")]

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        raise NotImplementedError("the delay env runs nothing")

    @property
    def submission(self) -> str | None:
        return self._submission

    async def close(self) -> None:
        return None


class PassingVerifier(Verifier):
    """Every submission passes, at once."""

    async def verify(self, task: Task, solution: str | None) -> Verdict:
        return Verdict(solution is not None, len(task.tests), len(task.tests))

    async def close(self) -> None:
        return None


async def overhead(report: Report, rounds: int = 5) -> None:
    """Wall time of a batch beside the same waits made by bare coroutines (the floor) and one after another."""
    engine = RolloutEngine(
        ScriptedPolicy(TURNS), DelayEnv, PassingVerifier(), system_and_user("Write Python."), RolloutConfig(max_turns=8)
    )
    tasks = [Task(str(index), "write x", tests=("assert x == 1",)) for index in range(TRAJECTORIES)]
    floor = [await _wall(_bare_waits()) for _ in range(rounds)]
    report.add(Figure("bare coroutines that wait as long", floor))
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        trajectories = await engine.run(tasks)
        samples.append((time.perf_counter() - started) * 1e3)
        assert all(t.reward == 1.0 and t.turns == len(TURNS) for t in trajectories), trajectories[0]
    note = f"{TRAJECTORIES} trajectories, {len(TURNS)} turns, 50 ms a call; calls one by one: {_one_by_one():.0f} ms"
    report.add(Figure("rollout engine", samples, peer="bare coroutines that wait as long", note=note))


async def _bare_waits() -> None:
    async def one() -> None:
        for _ in range(len(TURNS) + 1):
            await asyncio.sleep(DELAY)

    await asyncio.gather(*(one() for _ in range(TRAJECTORIES)))


async def _wall(waits: Any) -> float:
    started = time.perf_counter()
    await waits
    return (time.perf_counter() - started) * 1e3


def _one_by_one() -> float:
    return TRAJECTORIES * (len(TURNS) + 1) * DELAY * 1e3
