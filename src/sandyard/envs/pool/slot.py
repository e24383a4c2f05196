"""A place for one episode at a time, on a worker that may die under it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sandyard.envs.base import Env, Execution, StepResult, StepStatus, ToolSpec
from sandyard.envs.pool.base import WorkerLost
from sandyard.envs.pool.messages import Execute, Reply, Request, Reset, Step, pack_request, unpack
from sandyard.envs.pool.seat import Seat
from sandyard.envs.seeds import with_seed
from sandyard.errors import SandboxError
from sandyard.tasks.base import Task


class Slot(Env):
    """An env whose calls come one after another, in the order in which they were made.

    Raises what the env raises. When the worker dies, the episode's next step is INFRA_ERROR, and so is every
    further one until `reset`, which a new worker answers. An episode whose task has no seed gets one from
    `seed`, the slot's number and how many episodes it had.
    """

    def __init__(self, number: int, seat: Seat, seed: int, specs: Sequence[ToolSpec], limits: Mapping[str, float]):
        self.number = number
        self.busy = False  # lent to somebody
        self._seat = seat
        self._seed = seed
        self._specs = specs
        self._limits = limits
        self._submission: str | None = None
        self._episodes = 0
        self._generation: int | None = None  # of the worker that holds the episode
        self._doubtful = False  # a call was given up: something may still run there
        self._lock = asyncio.Lock()

    async def reset(self, task: Task | None = None) -> StepResult:
        async with self._lock:
            task = with_seed(task or Task("", ""), "pool", self._seed, self.number, self._episodes)
            self._episodes += 1
            self._submission = None
            if self._doubtful:
                await self._clear()
            try:
                return await self._result(Reset(task))
            except WorkerLost:
                # It may have been dead for long. Nothing of the episode was seen by anyone: once more.
                try:
                    return await self._result(Reset(task))
                except WorkerLost as lost:
                    return self._lost(lost)

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        async with self._lock:
            try:
                return await self._result(Step(tool_name, dict(arguments)))
            except WorkerLost as lost:
                return self._lost(lost)

    def tools(self) -> Sequence[ToolSpec]:
        return self._specs

    def time_limits(self) -> Mapping[str, float]:
        return self._limits

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Raises `WorkerLost`, too."""
        async with self._lock:
            value = (await self._ask(Execute(code, timeout))).value
        assert isinstance(value, Execution)
        return value

    @property
    def submission(self) -> str | None:
        return self._submission

    async def close(self) -> None:
        """End the episode; the slot can be reset again."""
        async with self._lock:
            await self._clear()

    async def _result(self, request: Reset | Step) -> StepResult:
        value = (await self._ask(request)).value
        assert isinstance(value, StepResult)
        return value

    async def _ask(self, request: Request) -> Reply:
        packed = pack_request(request)
        worker, generation = await self._seat.worker()
        if isinstance(request, Reset):
            self._generation = generation
        elif self._generation not in (None, generation):
            raise WorkerLost("the episode went with its worker")
        elif self._doubtful:
            raise SandboxError(f"slot {self.number}: a call was given up and its outcome is unknown", remedy="reset")
        self._doubtful = True
        try:
            reply: Reply = unpack(await worker.call(self.number, packed))
        except WorkerLost as lost:
            await self._seat.discard(generation, lost)
            raise
        self._doubtful = False
        if reply.error is not None:
            raise reply.error
        self._specs, self._submission = reply.specs, reply.submission
        return reply

    async def _clear(self) -> None:
        """Leave nothing of the episode on its worker; one that does not answer is replaced."""
        if self._generation is None:
            return
        doubtful, self._doubtful = self._doubtful, True  # also if this here is given up
        worker = await self._seat.occupant(self._generation)
        if worker is not None:
            try:
                await (worker.drop if doubtful else worker.release)(self.number)
            except WorkerLost as lost:
                await self._seat.discard(self._generation, lost)
        self._generation, self._doubtful = None, False

    def _lost(self, lost: WorkerLost) -> StepResult:
        info = {"error": lost, "slot": self.number}
        return StepResult(f"slot {self.number}: {lost}", status=StepStatus.INFRA_ERROR, info=info)
