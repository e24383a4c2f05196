"""The stages of a Dockerfile that is planned: each made when it is needed, in sandboxes of its own."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import AgentLinkError, BadRequest, GuestError
from sandyard.images.build.base import (
    BASE_STEP,
    Archives,
    Base,
    BuildFailed,
    Cache,
    Cached,
    Level,
    Log,
    State,
    Workshop,
)
from sandyard.images.build.copying import CopyFailed
from sandyard.images.build.engine import COMMIT_AFTER, MAX_LAYERS
from sandyard.images.build.stack import Stack
from sandyard.images.dockerfile.actions import Planned, Put, Run, Work
from sandyard.images.dockerfile.export import export
from sandyard.images.dockerfile.performing import Performer
from sandyard.images.dockerfile.putting import Supply
from sandyard.images.dockerfile.syntax import Dockerfile
from sandyard.images.dockerfile.tree import read_tree


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to build. `context`: the hash of an archive of files. `force`: the cache counts for nothing."""

    file: Dockerfile
    build_args: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    context: str | None = None
    start_cmd: str | None = None
    ready_cmd: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What a build stands on. `limit`: bytes of files that go from one stage to another at once, or that an archive
    unpacks to."""

    workshop: Workshop
    archives: Archives
    cache: Cache
    log: Log
    limit: int

    def context(self, recipe: Recipe) -> Path:
        """The archive of the build context. Raises `BuildFailed`."""
        archive = self.archives.path(recipe.context or "")
        if archive is None:
            raise BuildFailed(BASE_STEP, "the files of the build context were not uploaded, or are gone by now")
        return archive


@dataclass(slots=True)
class Plans:
    """Stages by index, images by name; `total` instructions."""

    bases: dict[str, Base] = field(default_factory=dict)
    stages: dict[int, Planned] = field(default_factory=dict)
    total: int = 0

    def key_of(self, origin: int | str) -> str:
        return self.stages[origin].key if isinstance(origin, int) else self.bases[origin].key

    def root(self, planned: Planned) -> Base:
        """The image that a stage starts from in the end."""
        base = planned.base
        while isinstance(base, int):
            base = self.stages[base].base
        return self.bases[base]


@dataclass(frozen=True, slots=True)
class Made:
    """The layers of a stage, the topmost first, and the bytes of those that the build added."""

    layers: Sequence[Path]
    size: int


class Maker:
    """`scratch`: a directory for archives on their way. `cached`: instructions that were not run."""

    def __init__(self, means: Means, plans: Plans, recipe: Recipe, scratch: Path) -> None:
        self.cached = 0
        self._means = means
        self._plans = plans
        self._recipe = recipe
        self._scratch = scratch
        self._archives = 0
        self._made: dict[int | str, Made] = {}

    async def made(self, origin: int | str) -> Made:
        """A stage, or an image as it is. Raises `BuildFailed`."""
        if origin not in self._made:
            if isinstance(origin, str):
                self._made[origin] = Made(self._plans.bases[origin].rootfs.layers, 0)
            else:
                self._made[origin] = await self._make(self._plans.stages[origin])
        return self._made[origin]

    async def _make(self, planned: Planned) -> Made:
        known, done = self._known(planned)
        below = await self.made(planned.base) if known is None else Made(known.layers, known.size_bytes)
        label = f"stage {planned.base}" if isinstance(planned.base, int) else self._plans.bases[planned.base].label
        self._means.log(f"FROM {label}{f' AS {planned.label}' if planned.label else ''}", step=BASE_STEP)
        stack = Stack(self._means.workshop, self._means.log, below.layers, below.size)
        try:
            await self._works(planned, done, stack)
        finally:
            await asyncio.shield(stack.close())
        return Made(stack.layers, stack.size)

    def _known(self, planned: Planned) -> tuple[Cached | None, int]:
        """The longest chain of instructions that the cache has, and how many they are."""
        for done in range(len(planned.works) if not self._recipe.force else 0, 0, -1):
            work = planned.works[done - 1]
            if work.action is not None and (known := self._means.cache.get(work.key)) is not None:
                return known, done
        return None, 0

    async def _works(self, planned: Planned, done: int, stack: Stack) -> None:
        last = max((n for n, work in enumerate(planned.works) if work.action is not None), default=-1)
        began = time.monotonic()
        for at, work in enumerate(planned.works):
            where = f"[{f'{planned.label} ' if planned.label else ''}{work.number}/{self._plans.total}]"
            cached = at < done and work.action is not None
            self.cached += at < done
            self._means.log(f"{'CACHED ' if cached else ''}{where} {work.title}", step=str(work.number))
            if at < done or work.action is None:
                continue
            stack.dirty = await self._perform(work, stack) or stack.dirty
            worth = time.monotonic() - began > COMMIT_AFTER and len(stack.layers) < MAX_LAYERS
            if stack.dirty and (worth or at == last):
                await stack.commit(str(work.number))
                began = time.monotonic()
            if not stack.dirty:
                self._means.cache.put(work.key, Cached(tuple(stack.layers), State(), stack.size))

    async def _perform(self, work: Work, stack: Stack) -> bool:
        assert work.action is not None
        means, step = self._means, str(work.number)
        supplies: dict[Put, Supply] = {}
        try:
            for wanted in _foreign(work):
                supplies[wanted] = await self._exported(wanted, stack, step)

            async def provide(wanted: Put) -> Supply:
                return supplies[wanted] if wanted in supplies else await self._own(wanted)

            agent = (await stack.open()).agent
            return await Performer(agent, provide, self._scratch, means.limit, means.log).perform(work.action, step)
        except (BuildFailed, GuestError, AgentLinkError, BadRequest, CopyFailed, ValueError) as error:
            if isinstance(error, BuildFailed) and error.network_missed and not means.workshop.has_network:
                means.log("it looked for a network, and builds have none on this node", level=Level.WARN, step=step)
            failure = await stack.failure(step, error)
            raise BuildFailed(step, f"Dockerfile:{work.line}: {work.title}: {failure.message}") from error
        finally:
            for supply in supplies.values():
                await asyncio.to_thread(supply.archive.unlink, True)

    async def _own(self, wanted: Put) -> Supply:
        """Heredocs, or files of the build context."""
        if wanted.inline:
            return await asyncio.to_thread(self._inline, wanted)
        archive = self._means.context(self._recipe)
        return Supply(archive, await asyncio.to_thread(read_tree, archive, self._means.limit, digests=False))

    async def _exported(self, wanted: Put, stack: Stack, step: str) -> Supply:
        """Files of another stage or image. One sandbox at a time: builds that each hold one and wait for a second
        would wait for one another."""
        assert wanted.origin is not None
        if stack.dirty and len(stack.layers) < MAX_LAYERS:
            await stack.commit(step)
        if not stack.dirty:
            await stack.close()
        made = await self.made(wanted.origin)
        archive = self._new_archive()
        source = Stack(self._means.workshop, self._means.log, made.layers)
        try:
            await export((await source.open()).agent, wanted.sources, archive, self._means.limit)
        finally:
            await asyncio.shield(source.close())
        return Supply(archive, await asyncio.to_thread(read_tree, archive, self._means.limit, digests=False), None)

    def _inline(self, wanted: Put) -> Supply:
        archive = self._new_archive()
        with tarfile.open(archive, "w") as tar:
            for name, text in wanted.inline:
                data = text.encode("utf-8", "surrogateescape")
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        return Supply(archive, read_tree(archive, self._means.limit, digests=False))

    def _new_archive(self) -> Path:
        self._archives += 1
        return self._scratch / f"{self._archives}.tar"


def _foreign(work: Work) -> Sequence[Put]:
    """What an instruction takes from other stages and images."""
    match work.action:
        case Put():
            return [work.action] if work.action.origin is not None else []
        case Run():
            return [mount.put() for mount in work.action.mounts if mount.kind == "bind" and mount.origin is not None]
    return []
