"""The VMMs that stand ready for what is started next: so many of each kind that was started last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.container.cgroups import Cgroups
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm.kind import Kind
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.owners import Owner, sweep
from sandyard.runtimes.microvm.spare import Spare
from sandyard.runtimes.room import host_memory

log = structlog.get_logger("sandyard.microvm")

KINDS = 3
_ROOM_MB = 512  # available on the host, below which none is made: sandboxes are refused soon
_PAUSE = 0.1  # seconds without a start, before one is made: a start is not to be slowed


class Spares:
    """`microvm.spares` of each kind that was asked for last. Those of one server; they end with it."""

    def __init__(self, settings: Settings, layout: Layout, cgroups: Callable[[], Cgroups]) -> None:
        self._count = settings.microvm.spares
        self._layout = layout
        self._cgroups = cgroups
        self._owner: Owner | None = None
        self._ready: dict[Kind, list[Spare]] = {}  # what was wanted last comes last
        self._starts = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._coming: Spare | None = None
        self._making: asyncio.Task[None] | None = None
        self._later: set[asyncio.Task[None]] = set()

    def take(self, kind: Kind) -> Spare | None:
        """One that ran when it was looked at last, if there is one; it is the caller's, with its `drop`."""
        ready = self._ready.get(kind)
        if not ready:
            return None
        spare = ready.pop(0)
        spare.take()
        return spare

    def want(self, kind: Kind) -> None:
        """Have some ready for the next start of this kind."""
        if not self._count:
            return
        self._ready[kind] = self._ready.pop(kind, [])
        while len(self._ready) > KINDS:
            for spare in self._ready.pop(next(iter(self._ready))):
                self.drop(spare)
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(self._make())

    def drop(self, spare: Spare) -> None:
        """In the background."""
        self.later(self.end(spare))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """What is to be done in the background, and before `close` is done; it raises nothing."""
        task = asyncio.ensure_future(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    @contextmanager
    def start(self) -> Iterator[None]:
        """A sandbox is started: meanwhile none is made."""
        self._starts += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._starts -= 1
            if not self._starts:
                self._idle.set()

    def ready(self) -> list[Spare]:
        return [spare for spares in self._ready.values() for spare in spares]

    async def sweep(self) -> None:
        """Remove what servers that were killed left of theirs. Raises `SandboxError`, `OSError`."""
        await ended(sweep, self._layout, self._cgroups())

    def taken_bytes(self) -> int:
        """What they have of the host's memory, those too that come up. Blocking, and quick."""
        spares = [*self.ready(), *([self._coming] if self._coming is not None else [])]
        found = [self._cgroups().taken(spare.name) for spare in spares]
        return sum(total - cache for total, cache in found)

    async def let_go(self) -> None:
        """End them. After the next start some are made again."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait((self._making,))
            self._making = None
        for spare in self.ready():
            self.drop(spare)
        self._ready.clear()
        if self._later:
            await asyncio.wait(self._later)

    async def close(self) -> None:
        """`let_go`, for good. It can be used again."""
        await self.let_go()
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    async def _make(self) -> None:
        try:
            while True:
                await self._calm()
                short = [kind for kind, ready in self._ready.items() if len(ready) < self._count]
                if not short or host_memory()[1] < _ROOM_MB:
                    return
                await self._add(short[-1])
        except (SandboxError, OSError, TimeoutError) as error:
            log.warning("no VMM stands ready for the next sandbox: it will have to wait for one", error=str(error))

    async def _calm(self) -> None:
        while True:
            await self._idle.wait()
            await asyncio.sleep(_PAUSE)
            if self._idle.is_set():
                return

    async def _add(self, kind: Kind) -> None:
        if self._owner is None:
            self._owner = Owner(self._layout)
        spare = Spare(self._layout, self._cgroups(), kind, self._owner.name())
        self._coming = spare
        try:
            await spare.come_up(self._ended)
        except BaseException:
            await finish(self.end(spare))
            raise
        finally:
            self._coming = None
        if kind in self._ready and spare.pid:
            self._ready[kind].append(spare)
        else:
            self.drop(spare)

    def _ended(self, spare: Spare) -> None:
        """By itself, or killed: the next start of its kind has another made."""
        ready = self._ready.get(spare.kind, [])
        if spare in ready:
            ready.remove(spare)
            self.drop(spare)

    async def end(self, spare: Spare) -> None:
        """What does not go is told in the log."""
        try:
            await spare.drop()
        except (SandboxError, OSError) as error:
            log.warning("something stays of a VMM that stood ready", name=spare.name, error=str(error))
