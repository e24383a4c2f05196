"""`EnvPool`: many episodes of one env, in this process or over Ray workers, with the same answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from sandyard.envs.base import Execution, StepResult, StepStatus, ToolSpec
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.base import Worker
from sandyard.envs.pool.lease import PooledEnv
from sandyard.envs.pool.local import LocalWorker
from sandyard.envs.pool.messages import Opened
from sandyard.envs.pool.ray import RayRuntime, RayWorker
from sandyard.envs.pool.seat import Seat
from sandyard.envs.pool.settings import PoolSettings
from sandyard.envs.pool.shard import refuse_elsewhere
from sandyard.envs.pool.slot import Slot
from sandyard.errors import BadRequest, Conflict, SandyardError
from sandyard.tasks.base import Task


@dataclass(frozen=True, slots=True)
class SlotCall:
    """One tool call in one slot."""

    slot: int
    tool_name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotProgram:
    """A program to run in one slot, outside the episode's accounting."""

    slot: int
    code: str
    timeout: float | None = None


class EnvPool:
    """`async with EnvPool(EnvFactory.of(MyEnv)) as pool`.

    Either in batches (`reset_batch`, `step_batch`, `execute_batch`, by slot number) or lent out one by one
    (`lease`). Batches answer in the order of the request. Slots work side by side, the calls to one slot in
    turn. A slot that fails answers INFRA_ERROR, with the exception as `info["error"]`, and costs no other
    slot anything; a worker that dies is replaced and costs its own slots their episodes.

    Raises `Unsupported` for envs whose episodes are on a server, `ConfigError`, and `HostError` without Ray.
    """

    def __init__(self, factory: EnvFactory, settings: PoolSettings | None = None) -> None:
        self.factory = factory
        self.settings = (settings or PoolSettings()).for_trajectories(1)
        refuse_elsewhere(factory.find())
        self._seats: list[Seat] = []
        self._slots: list[Slot] = []
        self._free: deque[Slot] = deque()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._specs: Sequence[ToolSpec] = ()
        self._limits: Mapping[str, float] = {}
        self._uses_ray = False
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __len__(self) -> int:
        return self.settings.size

    @property
    def remote(self) -> bool:
        return self.settings.remote

    def tools(self) -> Sequence[ToolSpec]:
        return self._specs

    def time_limits(self) -> Mapping[str, float]:
        return self._limits

    def pids(self) -> list[int | None]:
        """Of the workers' processes, in the order of the workers; slot n is on worker n modulo their number."""
        return [seat.pid for seat in self._seats]

    def env(self, number: int) -> Slot:
        """One slot as an env. Raises `BadRequest` for a number out of range, `Conflict` for a slot lent out."""
        self._require_open()
        if isinstance(number, bool) or not 0 <= number < len(self._slots):
            raise BadRequest(f"slot {number} is out of range: the pool has {len(self._slots)}", field="slot")
        slot = self._slots[number]
        if slot.busy:
            raise Conflict(f"slot {number} is lent out", remedy="use batches, or leases")
        return slot

    def lease(self) -> PooledEnv:
        """An env that has a slot of its own from `reset` to `close`: what a rollout engine takes for `make_env`."""
        self._require_open()
        return PooledEnv(self)

    async def reset_batch(self, tasks: Sequence[Task | None], slots: Sequence[int] | None = None) -> list[StepResult]:
        """Begin an episode in each of `slots` (the first ones, if not given). Raises `BadRequest`, `Conflict`
        before anything is done."""
        numbers = range(len(tasks)) if slots is None else slots
        if len(numbers) != len(tasks):
            raise BadRequest(f"{len(tasks)} tasks for {len(numbers)} slots", field="tasks")
        envs = [self.env(number) for number in numbers]
        return await asyncio.gather(*(_result(env, env.reset(task)) for env, task in zip(envs, tasks, strict=True)))

    async def step_batch(self, calls: Sequence[SlotCall]) -> list[StepResult]:
        """Do all calls, the slots side by side. Raises as `reset_batch`."""
        envs = [self.env(call.slot) for call in calls]
        return await asyncio.gather(
            *(_result(env, env.step(call.tool_name, call.arguments)) for env, call in zip(envs, calls, strict=True))
        )

    async def execute_batch(self, programs: Sequence[SlotProgram]) -> list[Execution | Exception]:
        """Run all programs; in the place of one that could not be run is what the env raised."""
        envs = [self.env(program.slot) for program in programs]
        answers = await asyncio.gather(
            *(env.execute(program.code, timeout=program.timeout) for env, program in zip(envs, programs, strict=True)),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if isinstance(answer, Execution | Exception)]

    async def take(self) -> Slot:
        """A free slot, when there is one; those who wait get theirs in turn. Give it back with `put`."""
        self._require_open()
        if self._free:
            slot = self._free.popleft()
            slot.busy = True
            return slot
        place: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.put(place.result())
            raise

    def put(self, slot: Slot) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(slot)
                return
        slot.busy = False
        self._free.append(slot)

    async def close(self) -> None:
        """Close all envs and end all workers; idempotent, and done to its end even when cancelled."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._close())
        await asyncio.shield(self._ending)

    async def _open(self) -> None:
        self._require_open()
        settings = self.settings
        workers = min(settings.workers, settings.size) if settings.remote else 1
        if settings.remote:
            RayRuntime.acquire(workers)
            self._uses_ray = True
        self._seats = [self._seat(number, range(number, settings.size, workers)) for number in range(workers)]
        first = await asyncio.gather(*(seat.worker() for seat in self._seats))
        opened: Opened = first[0][0].opened
        if opened.error is not None:
            raise opened.error
        self._specs, self._limits = opened.specs, opened.limits
        self._slots = [
            Slot(number, self._seats[number % workers], settings.seed, opened.specs, opened.limits)
            for number in range(settings.size)
        ]
        self._free.extend(self._slots)

    def _seat(self, number: int, slots: Sequence[int]) -> Seat:
        async def start() -> Worker:
            if self.settings.remote:
                return await RayWorker.start(self.factory, slots, self.settings.close_timeout)
            return LocalWorker(self.factory, slots, self.settings.close_timeout)

        return Seat(number, start)

    async def _close(self) -> None:
        for place in self._waiting:
            if not place.done():
                place.set_exception(Conflict("the pool was closed"))
        self._waiting.clear()
        try:
            await asyncio.gather(*(seat.close() for seat in self._seats))
        finally:
            if self._uses_ray:
                self._uses_ray = False
                RayRuntime.release()

    def _require_open(self) -> None:
        if self._ending is not None:
            raise Conflict("the pool is closed")


async def _result(slot: Slot, call: Awaitable[StepResult]) -> StepResult:
    """What the slot answered, or its failure as an answer."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - whatever an env raises is its own slot's failure
        boundary = str(error.boundary) if isinstance(error, SandyardError) else ""
        info = {"error": error, "slot": slot.number, "boundary": boundary}
        text = f"slot {slot.number}: {type(error).__name__}: {error}"
        return StepResult(text, status=StepStatus.INFRA_ERROR, info=info)
