"""Warm sandboxes, made ahead, so that a burst of creates finds them waiting.

Per template and size there is a shelf. Its aim follows the bursts it has seen (`Demand`), between
`pool.low` and `pool.high`; a reservation raises the aim for a burst that is announced. Shelves are
filled in the background, one sandbox at a time (a reservation: half of what the runtime starts at
once), never while a foreground create runs, only from places that nobody else wants, and without a
reservation only up to a share of the memory that places have. A shelf that nobody took from for
`pool.idle` seconds is emptied and forgotten, unless it was told to last; one whose template was built
anew is emptied at once, and what was seen of its demand goes on with the new build.
What takes long to start, as a template may by its ready command, holds up nobody: others are made
beside it, and it gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from sandyard.config import PoolSettings
from sandyard.errors import SandyardError
from sandyard.runtimes.base import Instance, Resources, Rootfs, Runtime, SandboxSpec
from sandyard.sandboxes.admission import Admission
from sandyard.sandboxes.demand import BREATH, Demand
from sandyard.sandboxes.log import SandboxLog
from sandyard.sandboxes.model import new_id, new_spec
from sandyard.sandboxes.starting import NO_START, StartCommand, Starter
from sandyard.sandboxes.templates import TemplateView

log = structlog.get_logger("sandyard.pool")

RESERVATION_LASTS = 300.0
SLOW_SECONDS = 5.0  # from here on a sandbox that is being made holds up nobody else


@dataclass(frozen=True, slots=True)
class ShelfKey:
    build_id: str
    resources: Resources


@dataclass(slots=True)
class Shelf:
    key: ShelfKey
    rootfs: Rootfs
    demand: Demand
    ready: deque[Instance] = field(default_factory=deque)
    starting: int = 0
    reserved: int = 0
    reserved_until: float = 0.0
    failures: int = 0
    retry_at: float = 0.0
    start: StartCommand = NO_START
    lasting: bool = False  # `pool.low` wait here, wanted or not
    memory: bool = False  # that of the topmost layer goes on
    passing: bool = False  # of a snapshot: nothing waits here but for bursts, and it goes when it is empty
    dropped: bool = False  # its build is no more: what is still being made for it goes

    def taken(self, now: float) -> None:
        self.demand.taken(now)
        self.reserved = max(self.reserved - 1, 0)

    def failed(self, now: float) -> None:
        """It is tried again later, and later each time."""
        self.failures += 1
        self.retry_at = now + min(2.0**self.failures, 60.0)

    def aim(self, settings: PoolSettings, now: float) -> int:
        if now > self.reserved_until:
            self.reserved = 0
        return max(self._unannounced(settings, now), self.reserved)

    @property
    def forgotten(self) -> bool:
        """Nothing waits here, and nothing is to."""
        return not (self.lasting or self.ready or self.starting or self.reserved)

    def _unannounced(self, settings: PoolSettings, now: float) -> int:
        wanted = self.demand.wanted(now)
        if not self.lasting and self.demand.idle(now) > settings.idle:
            return 0
        if self.passing:
            return min(wanted if wanted > 1 else 0, settings.high)
        return min(max(wanted, settings.low), settings.high)


class WarmPool:
    """`foreground` tells whether a caller waits for a create right now. The pool owns its sandboxes
    until `take` hands one over; a place in `admission` goes with it."""

    def __init__(
        self,
        runtime: Runtime,
        admission: Admission,
        settings: PoolSettings,
        *,
        starter: Starter,
        concurrency: int,
        foreground: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._admission = admission
        self._settings = settings
        self._starter = starter
        self._concurrency = concurrency
        self._foreground = foreground
        self._clock = clock
        self._shelves: dict[ShelfKey, Shelf] = {}
        self._wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], float] = {}  # since when, the oldest first
        self._ending: set[asyncio.Task[None]] = set()  # what ends a sandbox that waits no more
        self.evicted = 0  # how many gave way, or were too many
        self._keeper: asyncio.Task[None] | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._logs: dict[str, SandboxLog] = {}

    @property
    def ready(self) -> int:
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    @property
    def starting(self) -> int:
        return sum(shelf.starting for shelf in self._shelves.values())

    @property
    def aim(self) -> int:
        """How many are to wait in all."""
        now = self._clock()
        return sum(shelf.aim(self._settings, now) for shelf in self._shelves.values())

    @property
    def layers(self) -> set[Path]:
        """What its sandboxes stand on, and those that it may make."""
        return {layer for shelf in self._shelves.values() for layer in shelf.rootfs.layers}

    async def drop(self, build_ids: Collection[str]) -> None:
        """Forget the shelves of builds that are no more, with what waits on them."""
        for key in [key for key in self._shelves if key.build_id in build_ids]:
            shelf = self._shelves.pop(key)
            shelf.dropped = True
            while shelf.ready:
                await self._discard(shelf, self._off(shelf))

    def supersede(self, build_ids: Collection[str], template: TemplateView, resources: Resources) -> None:
        """`template` took the place of these builds, to `drop`: as many are made of it as of them."""
        for old in [shelf for key, shelf in self._shelves.items() if key.build_id in build_ids]:
            new = self.shelf(template, resources, passing=old.passing)
            new.demand.join(old.demand)
            new.lasting |= old.lasting
            new.reserved, new.reserved_until = max(new.reserved, old.reserved), old.reserved_until
        self._wake.set()

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="warm-pool")

    async def stop(self) -> None:
        """Stop filling and destroy every warm sandbox."""
        keeper, self._keeper = self._keeper, None
        for task in [keeper, *self._tasks]:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        while await self.evict():
            pass
        if self._ending:
            await asyncio.wait(self._ending)

    def shelf(self, template: TemplateView, resources: Resources, *, keep: bool = True, passing: bool = False) -> Shelf:
        """The shelf of this build and size. Without `keep` a new one is not filled: sizes are callers' to choose,
        and each shelf costs warm sandboxes. A `passing` one is filled only while there are bursts."""
        key = ShelfKey(template.build_id, resources)
        found = self._shelves.get(key)
        if found is None:
            start = StartCommand(template.start_cmd, template.ready_cmd)
            demand = Demand(self._settings.half_life)
            found = Shelf(key, template.rootfs, demand, start=start, memory=template.memory, passing=passing)
            if keep:
                self._shelves[key] = found
        return found

    def take(self, shelf: Shelf) -> Instance | None:
        """A warm sandbox with its place, or None. Either way the shelf learns that one was wanted."""
        shelf.taken(self._clock())
        self._wake.set()
        return self.grab(shelf)

    def grab(self, shelf: Shelf) -> Instance | None:
        """Like `take`, for one that was already counted as wanted."""
        if not shelf.ready:
            return None
        return self._off(shelf, newest=False)

    def log_of(self, instance: Instance) -> SandboxLog:
        """What was logged of a sandbox that was taken, from its start command's output on."""
        return self._logs.pop(instance.spec.sandbox_id, None) or SandboxLog()

    def reserve(self, shelf: Shelf, count: int) -> None:
        """Expect `count` creates soon. Lapses when they came, or after five minutes."""
        shelf.reserved = max(shelf.reserved, min(count, self._admission.max_count))
        shelf.reserved_until = self._clock() + RESERVATION_LASTS
        self._wake.set()

    def warm_up(self, shelf: Shelf) -> None:
        """Bring the shelf to `pool.low` before anybody asks, and keep it there."""
        shelf.lasting = True
        self._wake.set()

    async def evict(self) -> bool:
        """Destroy one warm sandbox, or one that takes long to become one, and give its place back; False if there
        is none."""
        shelf = max(self._shelves.values(), key=lambda s: len(s.ready), default=None)
        if shelf is None or not shelf.ready:
            return await self._call_off()
        self.evicted += 1
        await self._discard(shelf, self._off(shelf))
        return True

    async def next_ready(self) -> bool:
        """Wait until one that is being made is ready, has failed or takes long; False if none is being made."""
        tasks = self._quick()
        if not tasks:
            return False
        await asyncio.wait(tasks, timeout=SLOW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _keep(self) -> None:
        while True:
            delay = self._fill()
            self._wake.clear()
            # Not wait_for: in Python 3.11 it can lose a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    def _fill(self) -> float:
        """Start what may be started now; the seconds after which to look again."""
        now = self._clock()
        delay = 30.0
        for shelf in list(self._shelves.values()):
            aim = shelf.aim(self._settings, now)
            self._trim(shelf, aim)
            if aim == 0 and shelf.forgotten:
                self._shelves.pop(shelf.key)
            missing = aim - len(shelf.ready) - shelf.starting
            if missing > 0:
                delay = min(delay, self._make_some(shelf, missing, now))
        return delay

    def _make_some(self, shelf: Shelf, missing: int, now: float) -> float:
        """Start up to `missing`; the seconds after which to look again."""
        calm = max(shelf.demand.last_take + BREATH, shelf.retry_at) - now
        if calm > 0 or self._foreground():
            return max(calm, 0.02)
        limit = self._concurrency if shelf.reserved else 1
        for _ in range(missing):
            if not self._roomy(shelf):
                break
            if shelf.starting >= limit or len(self._quick()) >= limit:
                return SLOW_SECONDS
            self._admission.hold(shelf.key.resources, starts=True)
            shelf.starting += 1
            self._spawn(self._make(shelf))
        return 30.0

    def _roomy(self, shelf: Shelf) -> bool:
        """Whether there is a place that nobody else wants, within what warm sandboxes may have together."""
        resources = shelf.key.resources
        if self._admission.shortage(resources) is not None:
            return False
        if len(shelf.ready) + shelf.starting < shelf.reserved or not self._admission.budget_mb:
            return True
        weigh = self._admission.promised_mb
        waiting = sum((len(s.ready) + s.starting) * weigh(s.key.resources) for s in self._shelves.values())
        return waiting + weigh(resources) <= self._admission.budget_mb * self._settings.memory_share

    def _trim(self, shelf: Shelf, aim: int) -> None:
        """End what is too much on this shelf."""
        while len(shelf.ready) > aim:
            self.evicted += 1
            task = asyncio.create_task(self._discard(shelf, self._off(shelf)))
            self._ending.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        self._wake.set()

    def _off(self, shelf: Shelf, *, newest: bool = True) -> Instance:
        """Take one off its shelf."""
        instance = shelf.ready.pop() if newest else shelf.ready.popleft()
        self._unwatch(instance)
        return instance

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = self._clock()
        task.add_done_callback(self._settled)

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._wake.set()

    def _quick(self) -> list[asyncio.Task[None]]:
        since = self._clock() - SLOW_SECONDS
        return [task for task, began in self._tasks.items() if began > since]

    async def _call_off(self) -> bool:
        """End the longest of what takes long to make; False if nothing does."""
        task, began = next(iter(self._tasks.items()), (None, 0.0))
        if task is None or began > self._clock() - SLOW_SECONDS:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    async def _make(self, shelf: Shelf) -> None:
        sandbox_id = new_id()
        spec = new_spec(sandbox_id, shelf.rootfs, shelf.key.resources, memory=shelf.memory)
        instance = None
        began = self._clock()
        try:
            instance = await self._start(spec, shelf.start)
            shelf.failures = 0
            shelf.demand.made(self._clock() - began)
            if shelf.dropped:
                await self._discard(shelf, instance)
                return
            shelf.ready.append(instance)
            self._watches[sandbox_id] = asyncio.create_task(self._watch(shelf, instance))
        except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the pool backs off and goes on
            shelf.failed(self._clock())
            log.warning("warm sandbox could not be made", build=shelf.key.build_id, error=str(error))
        except asyncio.CancelledError:
            shelf.failed(self._clock())
            raise
        finally:
            if instance is None:
                self._admission.release(shelf.key.resources)
            shelf.starting -= 1

    async def _start(self, spec: SandboxSpec, start: StartCommand) -> Instance:
        """A sandbox whose start command has made it ready; where that fails, nothing is left."""
        instance = await self._runtime.create(spec)
        log = SandboxLog()
        try:
            if spec.memory is None:  # else it has run already
                await self._starter.run(instance, start, log)
        except BaseException:
            await asyncio.shield(self._destroy(spec.sandbox_id))
            raise
        self._logs[spec.sandbox_id] = log
        return instance

    async def _watch(self, shelf: Shelf, instance: Instance) -> None:
        death = await instance.wait_dead()
        log.warning("warm sandbox died", sandbox=instance.spec.sandbox_id, reason=death.reason, detail=death.detail)
        self._watches.pop(instance.spec.sandbox_id, None)
        shelf.ready.remove(instance)
        await self._discard(shelf, instance)
        self._wake.set()

    def _unwatch(self, instance: Instance) -> None:
        task = self._watches.pop(instance.spec.sandbox_id, None)
        if task is not None:
            task.cancel()

    async def _discard(self, shelf: Shelf, instance: Instance) -> None:
        self._logs.pop(instance.spec.sandbox_id, None)
        try:
            await self._destroy(instance.spec.sandbox_id)
        finally:
            self._admission.release(shelf.key.resources)

    async def _destroy(self, sandbox_id: str) -> None:
        try:
            await self._runtime.destroy(sandbox_id)
        except SandyardError as error:
            log.error("warm sandbox could not be destroyed", sandbox=sandbox_id, error=str(error))
