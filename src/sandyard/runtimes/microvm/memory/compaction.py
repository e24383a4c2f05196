"""Memory images that have come to many deltas get few again, in the background, one at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from sandyard.errors import SandboxError
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm.memory.image import Manifest
from sandyard.runtimes.microvm.memory.merging import Runs, compact

log = structlog.get_logger("sandyard.microvm")

_REST = 0.05  # seconds at most between two runs
_SYNCED = 32  # runs: what is brought to the disk at its end is to be little, whoever waits for it


class Stopped(Exception):
    """Somebody wants the image, or its place."""


class Pace:
    """Of a merge: no more than half of the time is spent at work, until it is stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def stop(self) -> None:
        """From any thread."""
        self._stopped.set()

    def __call__(self, runs: Runs, path: Path) -> Runs:
        """Raises `Stopped`."""
        began = time.monotonic()
        for count, run in enumerate(runs, 1):
            yield run
            if count % _SYNCED == 0:
                sync(path)
            if self._stopped.wait(min(time.monotonic() - began, _REST)):
                raise Stopped
            began = time.monotonic()


class Compactor:
    """`trust` is told of an image whose topmost pages were written anew.

    An image of a sandbox is not to be removed, nor opened by the names of its files, while it is waiting here
    (`leave`). It may be shared and checked, by `image.settled`, and the files of a layer may be removed."""

    def __init__(self, trust: Callable[[Path, Manifest], None]) -> None:
        self._trust = trust
        self._waiting: dict[Path, int] = {}
        self._now: tuple[Path, Pace, asyncio.Future[Manifest | None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def soon(self, name: Path, floor: int = 0) -> None:
        """Look at the image `name`, of whose deltas the `floor` lowest are better left alone."""
        if self._closed:
            return
        self._waiting[name] = floor
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def leave(self, home: Path) -> None:
        """Leave the images in the directory `home` as they are; when this returns nothing of it is at work there."""
        for name in [name for name in self._waiting if name.parent == home]:
            del self._waiting[name]
        if self._now is not None and self._now[0].parent == home:
            _, pace, job = self._now
            pace.stop()
            await asyncio.wait((job,))

    async def idle(self) -> None:
        """Wait until nothing is left to do."""
        while self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """Stop, for good; what is not done stays as it is. Idempotent."""
        self._closed = True
        self._waiting.clear()
        if self._now is not None:
            self._now[1].stop()
        await self.idle()

    async def _work(self) -> None:
        pool = ThreadPoolExecutor(1, "compaction")  # it rests most of the time: not in a place of others
        try:
            while self._waiting:
                name = next(iter(self._waiting))
                await self._compact(pool, name, self._waiting.pop(name))
        finally:
            if self._now is not None:
                self._now[1].stop()
                self._now = None
            pool.shutdown()

    async def _compact(self, pool: ThreadPoolExecutor, name: Path, floor: int) -> None:
        pace = Pace()
        job = asyncio.get_running_loop().run_in_executor(pool, compact, name, floor, pace)
        job.add_done_callback(_seen)
        self._now = (name, pace, job)
        try:
            made = await asyncio.shield(job)
            self._now = None
            if made is not None:
                await ended(self._trust, name, made)
                log.info("memory compacted", image=str(name), deltas=len(made.pages))
        except Stopped:
            log.debug("memory is compacted later", image=str(name))
        except (SandboxError, OSError) as error:
            # It is whole as it was. One that was removed meanwhile is nothing to tell of.
            if name.with_name(f"{name.name}.memory").exists():
                log.warning("memory stays in many parts", image=str(name), error=str(error))
        self._now = None


def _seen(job: asyncio.Future[Manifest | None]) -> None:
    """What it failed with is no news, also where nobody waits for it any more."""
    if not job.cancelled():
        job.exception()
