"""The sandboxes of builds: each has a place like any other, and none outlives its build."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import structlog

from sandyard.errors import CapacityError, SandyardError
from sandyard.guest.base import Agent
from sandyard.images.build import Level, Log
from sandyard.images.build.base import FINAL_STEP
from sandyard.network.runtime import NetworkedRuntime, permit
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.sandboxes import SandboxManager
from sandyard.sandboxes.model import new_id
from sandyard.sandboxes.starting import StartCommand

log = structlog.get_logger("sandyard.builds")

DEATH_NEWS_SECONDS = 2.0
PLACE_POLL_SECONDS = 1.0
_SILENT_SECONDS = 3.0


class SandboxWorkshop:
    """Context manager of one build. Layers it committed are safe from `Catalog.collect` until it ends:
    by then the build or the cache names them, or they are nobody's."""

    def __init__(self, manager: SandboxManager, resources: Resources, say: Log) -> None:
        self._manager = manager
        self._resources = resources
        self._say = say
        self._reserved = ExitStack()
        self.has_network = isinstance(manager.runtime, NetworkedRuntime)

    def __enter__(self) -> SandboxWorkshop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserved.close()

    async def open(self, rootfs: Rootfs) -> SandboxBench:
        """Start a sandbox; waits for a place as long as there is none. Raises `CreateFailed`.

        Its layers stay until the build ends, whoever else forgets them meanwhile."""
        self._reserved.enter_context(self._manager.maker.holding(rootfs))
        await self._take_place(self._resources)
        sandbox_id = new_id()
        try:
            spec = SandboxSpec(sandbox_id, rootfs, self._resources, hostname="build")
            with self._told("starting a sandbox"):
                instance = await self._manager.runtime.create(spec)
        except BaseException:
            self._manager.admission.release(self._resources)
            raise
        bench = SandboxBench(self._manager, instance, self._reserved)
        try:
            await permit(self._manager.runtime, sandbox_id, {})  # whatever the node lets anybody reach
        except BaseException:
            await bench.close()
            raise
        return bench

    async def remember(self, rootfs: Rootfs, resources: Resources, start: StartCommand) -> tuple[Rootfs, int] | None:
        """Start what was built once, as every sandbox of it would be, and keep it with its memory as it is when it
        is ready: what to start from then, and the bytes of that. None where nothing is started, where the runtime
        keeps files only, and, with the reason in the log, where it did not succeed: it can be started all the same."""
        if not start or not self._manager.runtime.capabilities.memory_snapshot:
            return None
        await self._take_place(resources)
        try:
            with self._told("starting it as every sandbox of it, to be kept with its memory"):
                instance, _ = await self._manager.maker.make(rootfs, resources, start)
        except SandyardError as error:
            self._say(f"not kept with its memory: {error}", level=Level.WARN, step=FINAL_STEP)
            return None
        bench = SandboxBench(self._manager, instance, self._reserved)
        try:
            path, size = await bench.commit(memory=True)
        except SandyardError as error:
            self._say(f"not kept with its memory: {error}", level=Level.WARN, step=FINAL_STEP)
            return None
        finally:
            await bench.close()
        self._say(f"kept with its memory as it is when it is ready, {size >> 10} KiB", step=FINAL_STEP)
        return replace(rootfs, layers=[path, *instance.spec.rootfs.layers]), size

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """What takes long is said: a microVM that is the first of its size boots."""
        timer = asyncio.get_running_loop().call_later(_SILENT_SECONDS, self._say, f"{what} …")
        try:
            yield
        finally:
            timer.cancel()

    async def _take_place(self, resources: Resources) -> None:
        self._manager.admission.check(resources)
        told = False
        while True:
            try:
                await self._manager.maker.make_room(resources)
                return
            except CapacityError as error:
                if not told:
                    self._say(f"waiting for a place: {error.message}", level=Level.WARN)
                    told = True
            await asyncio.sleep(PLACE_POLL_SECONDS)


class SandboxBench:
    def __init__(self, manager: SandboxManager, instance: Instance, reserved: ExitStack) -> None:
        self._manager = manager
        self._instance = instance
        self._reserved = reserved
        self._closing: asyncio.Task[None] | None = None

    @property
    def agent(self) -> Agent:
        return self._instance.agent

    async def why_dead(self) -> str | None:
        try:
            await self.agent.hello()
        except SandyardError:
            try:
                async with asyncio.timeout(DEATH_NEWS_SECONDS):
                    death = await self._instance.wait_dead()
            except TimeoutError:
                return "its agent does not answer"
            return f"{death.reason.value}{f' ({death.detail})' if death.detail else ''}"
        return None

    async def commit(self, *, memory: bool = False) -> tuple[Path, int]:
        path = self._reserved.enter_context(self._manager.catalog.new_layer())
        return path, await self._instance.commit(path, memory=memory)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        spec = self._instance.spec
        try:
            await self._manager.runtime.destroy(spec.sandbox_id)
        except SandyardError as error:
            log.error("sandbox of a build could not be destroyed", sandbox=spec.sandbox_id, error=str(error))
            self._manager.reaper.straggle(spec.sandbox_id)
        finally:
            self._manager.admission.release(spec.resources)
