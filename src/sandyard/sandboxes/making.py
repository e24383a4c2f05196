"""Making sandboxes: a place first, then the sandbox, then its start command."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import SandyardError
from sandyard.runtimes.base import Instance, Resources, Rootfs
from sandyard.sandboxes.log import SandboxLog
from sandyard.sandboxes.model import new_id, new_spec
from sandyard.sandboxes.pool import Shelf
from sandyard.sandboxes.starting import StartCommand

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.making")


class Maker:
    """`creating`: how many creates are waiting for the runtime now."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._held: Counter[Path] = Counter()
        self.creating = 0

    @property
    def layers(self) -> set[Path]:
        """What sandboxes that are being made stand on."""
        return set(self._held)

    @contextlib.contextmanager
    def holding(self, rootfs: Rootfs) -> Iterator[None]:
        """Until the context ends no layer of `rootfs` is removed: by then a sandbox has them, or nobody."""
        self._held.update(rootfs.layers)
        try:
            yield
        finally:
            self._held.subtract(rootfs.layers)
            self._held += Counter()  # drops what is held no more

    async def obtain(self, shelf: Shelf) -> tuple[Instance, SandboxLog, str]:
        """A sandbox in a place of its own that is ready, and whether it was warm or cold.

        Raises `CapacityError`, `BadRequest`, `CreateFailed`."""
        pool = self._manager.pool
        instance = pool.take(shelf)
        kind = "cold" if instance is None else "warm"
        if instance is None:
            instance = await self._place(shelf)
        if instance is not None:
            return instance, pool.log_of(instance), kind
        return *await self.make(shelf.rootfs, shelf.key.resources, shelf.start, memory=shelf.memory), kind

    async def make(
        self, rootfs: Rootfs, resources: Resources, start: StartCommand, *, memory: bool = False
    ) -> tuple[Instance, SandboxLog]:
        """A sandbox that is ready, in a place that was taken; where this fails the place is given back. With the
        `memory` of the topmost layer its start command runs in it already."""
        manager = self._manager
        sandbox_id, lines = new_id(), SandboxLog()
        self.creating += 1
        try:
            instance = await manager.runtime.create(new_spec(sandbox_id, rootfs, resources, memory=memory))
            try:
                if not memory:
                    await manager.starter.run(instance, start, lines)
            except BaseException:
                await asyncio.shield(self._discard(sandbox_id))
                raise
        except BaseException:
            manager.admission.release(resources)
            raise
        finally:
            self.creating -= 1
        return instance, lines

    async def make_room(self, resources: Resources) -> None:
        """Take a place; warm sandboxes give way. Raises `CapacityError`, `BadRequest`."""
        manager = self._manager
        admission = manager.admission
        admission.check(resources)
        while admission.shortage(resources) is not None and (
            await admission.let_go(resources) or await manager.pool.evict()
        ):
            pass
        manager.admission.take(resources, manager.retry_after())

    async def _place(self, shelf: Shelf) -> Instance | None:
        """Take a place, from the pool if need be; a sandbox comes with it if one is ready by then."""
        manager, resources = self._manager, shelf.key.resources
        manager.admission.check(resources)
        while manager.admission.shortage(resources) is not None:
            if await manager.admission.let_go(resources) or await manager.pool.evict():
                continue
            if not await manager.pool.next_ready():
                break
            instance = manager.pool.grab(shelf)
            if instance is not None:
                return instance
        manager.admission.take(resources, manager.retry_after())
        return None

    async def _discard(self, sandbox_id: str) -> None:
        """Destroy what was promised to nobody."""
        try:
            await self._manager.runtime.destroy(sandbox_id)
        except SandyardError as error:
            log.error("sandbox could not be destroyed", sandbox=sandbox_id, error=str(error))
            self._manager.reaper.straggle(sandbox_id)
