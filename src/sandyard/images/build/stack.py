"""The layers of a build so far, and the sandbox that stands on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sandyard.errors import SandyardError
from sandyard.images.build.base import Bench, BuildFailed, Level, Log, State, Workshop


class Stack:
    """`layers` the topmost first; `size` in bytes of those added here. `dirty`: files changed since the topmost.
    Whoever made it closes it."""

    def __init__(self, workshop: Workshop, log: Log, layers: Sequence[Path] = (), size: int = 0) -> None:
        self.layers = list(layers)
        self.size = size
        self.dirty = False
        self._workshop = workshop
        self._log = log
        self._bench: Bench | None = None

    async def open(self, state: State | None = None) -> Bench:
        """The sandbox, started if there is none. Raises `CapacityError` and `CreateFailed`."""
        if self._bench is None:
            self._bench = await self._workshop.open((state or State()).rootfs(self.layers))
        return self._bench

    async def commit(self, step: str) -> None:
        """Make what changed the topmost layer, and close the sandbox."""
        assert self._bench is not None  # something changed in it
        began = time.monotonic()
        path, size = await self._bench.commit()
        self.layers.insert(0, path)
        self.dirty = False
        self.size += size
        self._log(f"layer of {size >> 10} KiB kept in {time.monotonic() - began:.2f} s", level=Level.DEBUG, step=step)
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        bench, self._bench = self._bench, None
        if bench is not None:
            await bench.close()

    async def why_dead(self) -> str | None:
        return await self._bench.why_dead() if self._bench is not None else None

    async def failure(self, step: str, error: Exception, title: str | None = None) -> BuildFailed:
        """What a step came to, in one line: of what the sandbox died, if it did."""
        message = error.message if isinstance(error, SandyardError) else str(error)
        if (why := await self.why_dead()) is not None:
            message = (
                f"{message}; the sandbox died: {why}" if isinstance(error, BuildFailed) else f"the sandbox died: {why}"
            )
        return BuildFailed(step, f"failed to run {title}: {message}" if title else message)
