"""A Dockerfile's build: stages in their order, each in sandboxes of its own, layers kept by content.

What a sandbox needs beyond the image (the account `user`) is added above the last stage, as for every template.
"""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import AgentLinkError, BadRequest, GuestError
from sandyard.images.build.accounts import is_dir, make_dir, prepare
from sandyard.images.build.base import (
    BASE_STEP,
    Archives,
    Base,
    BuildFailed,
    Built,
    Cache,
    Cached,
    Level,
    Log,
    State,
    Workshop,
)
from sandyard.images.build.chain import then
from sandyard.images.build.copying import CopyFailed
from sandyard.images.build.engine import COMMIT_AFTER, MAX_LAYERS
from sandyard.images.build.stack import Stack
from sandyard.images.build.start import settle
from sandyard.images.dockerfile.actions import Planned, Put, Work
from sandyard.images.dockerfile.config import ImageSettings, scratch_env
from sandyard.images.dockerfile.export import export
from sandyard.images.dockerfile.performing import Performer, process_user
from sandyard.images.dockerfile.plan import Planner
from sandyard.images.dockerfile.putting import Supply
from sandyard.images.dockerfile.stages import SCRATCH, Stage, Stages, origins, split, unused_args
from sandyard.images.dockerfile.syntax import Dockerfile, DockerfileError
from sandyard.images.dockerfile.tree import Tree, read_tree

READY = "sleep 3"  # a start command of which only the Dockerfile tells gets that long to fail

FindBase = Callable[[str], Awaitable[Base]]
"""An image by the name that a Dockerfile has for it; `scratch` has no files. Raises `BuildFailed`."""


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

    def check(self) -> None:
        """Raises `BadRequest` for what can be seen without a base: order of stages, target, platforms."""
        stages = split(self.file, self.build_args)
        stages.target(self.target)


@dataclass(slots=True)
class _Stage:
    layers: Sequence[Path]
    size: int


class DockerBuild:
    """One build. Everything it opens is closed when `run` ends, however that is. `limit`: bytes of files that go
    from one stage to another at once, or that an archive unpacks to."""

    def __init__(
        self, workshop: Workshop, archives: Archives, cache: Cache, log: Log, find: FindBase, *, limit: int
    ) -> None:
        self._workshop = workshop
        self._archives = archives
        self._cache = cache
        self._log = log
        self._find = find
        self._limit = limit
        self._bases: dict[str, Base] = {}
        self._planned: dict[int, Planned] = {}
        self._made: dict[int | str, _Stage] = {}
        self._total = 0
        self._cached = 0

    async def run(self, recipe: Recipe, *, ready_seconds: float = 600.0) -> Built:
        """Raises `BuildFailed` naming the step and the line; what the workshop raises passes."""
        with tempfile.TemporaryDirectory(prefix="sandyard-build-") as scratch:
            return await self._run(recipe, Path(scratch), ready_seconds)

    async def planned(self, recipe: Recipe) -> Planned:
        """The last stage as it would be built. Raises `BuildFailed`."""
        try:
            return await self._plan(recipe)
        except DockerfileError as error:
            raise BuildFailed(BASE_STEP, str(error)) from error

    async def stage(self, recipe: Recipe) -> tuple[Sequence[Path], ImageSettings]:
        """The layers of the last stage, with nothing added, and its settings. Raises as `run` does."""
        with tempfile.TemporaryDirectory(prefix="sandyard-build-") as scratch:
            last = await self.planned(recipe)
            maker = _Maker(self, recipe, Path(scratch))
            return (await maker.made(last.index)).layers, last.settings

    async def _run(self, recipe: Recipe, scratch: Path, ready_seconds: float) -> Built:
        last = await self.planned(recipe)
        maker = _Maker(self, recipe, scratch)
        made = await maker.made(last.index)
        base = self._bases[self._root(last)]
        stack = Stack(self._workshop, self._log, made.layers, made.size)
        try:
            state = await self._finish(recipe, last, base, stack)
            start, ready = recipe.start_cmd, recipe.ready_cmd
            if start is None and last.settings.command_is_own:
                start = shlex.join(last.settings.start()) or None
            if start is None and ready is None and not last.settings.command_is_own:
                start, ready = base.start_cmd, base.ready_cmd
            implied = start is not None and recipe.start_cmd is None and ready is None
            tried = then(last.key, "STATE", [json.dumps([sorted(state.env.items()), state.workdir, state.user])])
            waits = await settle(
                stack, self._cache, self._log, tried, state, start, READY if implied else ready,
                fresh=recipe.force, ready_seconds=ready_seconds,
            )  # fmt: skip
            rootfs = state.rootfs(stack.layers)
            oci = last.settings.oci()
            return Built(rootfs, stack.size, self._cached, start, None if implied else waits, oci)
        finally:
            await asyncio.shield(stack.close())

    async def _finish(self, recipe: Recipe, last: Planned, base: Base, stack: Stack) -> State:
        """What every template has, above the last stage; where its sandboxes begin."""
        settings = last.settings
        # Of the settings, only these two decide what is done here; variables are no file's business.
        workdir = settings.workdir or base.rootfs.workdir or "/"
        user = settings.user or base.rootfs.user or ""
        key = then(last.key, "FINISH", [workdir, user])
        known = self._cache.get(key) if not recipe.force else None
        if known is not None:
            stack.layers, stack.size = list(known.layers), known.size_bytes
            return State(dict(settings.env), known.state.workdir, known.state.user)
        try:
            agent = (await stack.open()).agent
            stack.dirty = await prepare(agent)
            if not await is_dir(agent, workdir):  # an image may name one that it does not have
                stack.dirty = await make_dir(agent, workdir, "0:0") or stack.dirty
            name = await process_user(agent, user)
        except (GuestError, AgentLinkError, ValueError) as error:
            raise await stack.failure(BASE_STEP, error) from error
        if stack.dirty:
            await stack.commit(BASE_STEP)
        state = State(dict(settings.env), workdir, "root" if name == "0:0" else name)
        self._cache.put(key, Cached(tuple(stack.layers), State({}, state.workdir, state.user), stack.size))
        return state

    def _root(self, planned: Planned) -> str:
        """The image that a stage starts from in the end."""
        base = planned.base
        while isinstance(base, int):
            base = self._planned[base].base
        return base

    # --- before anything runs ---

    async def _plan(self, recipe: Recipe) -> Planned:
        stages = split(recipe.file, recipe.build_args)
        target = stages.target(recipe.target)
        wanted = stages.needed(target)
        for name in unused_args(stages):
            self._log(f"no ARG declares the build argument {name}", level=Level.WARN, step=BASE_STEP)
        for name in _images(stages, wanted):
            self._bases[name] = await self._find(name)
        context = await self._context(recipe)
        planner = Planner(stages, context, self._key_of, network=self._workshop.has_network)
        number = 1
        for stage in wanted:
            planned = planner.plan(stage, self._settings_of(stage), number)
            self._planned[stage.index] = planned
            number += len(planned.works)
        self._total = number - 1
        if not self._workshop.has_network:
            self._log("builds have no network on this node", level=Level.DEBUG, step=BASE_STEP)
        return self._planned[target.index]

    def _settings_of(self, stage: Stage) -> ImageSettings:
        if isinstance(stage.base, int):
            return self._planned[stage.base].settings
        base = self._bases[stage.base]
        if base.oci is not None:
            return ImageSettings.of(base.oci)
        # Made by no Dockerfile: as an image that sets variables only, so that a build begins as root.
        return ImageSettings(env={**scratch_env(), **base.rootfs.env})

    def _key_of(self, origin: int | str) -> str:
        return self._planned[origin].key if isinstance(origin, int) else self._bases[origin].key

    async def _context(self, recipe: Recipe) -> Tree | None:
        if recipe.context is None:
            return None
        archive = self._context_archive(recipe)
        try:
            return await asyncio.to_thread(read_tree, archive, self._limit)
        except BadRequest as error:
            raise BuildFailed(BASE_STEP, f"the build context: {error.message}") from error

    def _context_archive(self, recipe: Recipe) -> Path:
        archive = self._archives.path(recipe.context or "")
        if archive is None:
            raise BuildFailed(BASE_STEP, "the files of the build context were not uploaded, or are gone by now")
        return archive


class _Maker:
    """Makes the stages of a build that is planned, each when it is needed."""

    def __init__(self, build: DockerBuild, recipe: Recipe, scratch: Path) -> None:
        self._build = build
        self._recipe = recipe
        self._scratch = scratch
        self._archives = 0

    async def made(self, origin: int | str) -> _Stage:
        """Raises `BuildFailed`."""
        build = self._build
        if origin not in build._made:
            if isinstance(origin, str):
                build._made[origin] = _Stage(build._bases[origin].rootfs.layers, 0)
            else:
                build._made[origin] = await self._make(build._planned[origin])
        return build._made[origin]

    async def _make(self, planned: Planned) -> _Stage:
        build = self._build
        known, done = self._known(planned)
        below = await self.made(planned.base) if known is None else _Stage(known.layers, known.size_bytes)
        label = build._bases[planned.base].label if isinstance(planned.base, str) else f"stage {planned.base}"
        build._log(f"FROM {label}{f' AS {planned.label}' if planned.label else ''}", step=BASE_STEP)
        stack = Stack(build._workshop, build._log, below.layers, below.size)
        try:
            await self._works(planned, done, stack)
        finally:
            await asyncio.shield(stack.close())
        return _Stage(stack.layers, stack.size)

    def _known(self, planned: Planned) -> tuple[Cached | None, int]:
        """The longest chain of instructions that the cache has, and how many they are."""
        for done in range(len(planned.works) if not self._recipe.force else 0, 0, -1):
            work = planned.works[done - 1]
            if work.action is not None and (known := self._build._cache.get(work.key)) is not None:
                return known, done
        return None, 0

    async def _works(self, planned: Planned, done: int, stack: Stack) -> None:
        build = self._build
        last = max((n for n, work in enumerate(planned.works) if work.action is not None), default=-1)
        began = time.monotonic()
        for at, work in enumerate(planned.works):
            where = f"[{f'{planned.label} ' if planned.label else ''}{work.number}/{build._total}]"
            cached = at < done and work.action is not None
            build._cached += at < done
            build._log(f"{'CACHED ' if cached else ''}{where} {work.title}", step=str(work.number))
            if at < done or work.action is None:
                continue
            stack.dirty = await self._perform(work, stack) or stack.dirty
            worth = time.monotonic() - began > COMMIT_AFTER and len(stack.layers) < MAX_LAYERS
            if stack.dirty and (worth or at == last):
                await stack.commit(str(work.number))
                began = time.monotonic()
            if not stack.dirty:
                build._cache.put(work.key, Cached(tuple(stack.layers), State(), stack.size))

    async def _perform(self, work: Work, stack: Stack) -> bool:
        assert work.action is not None
        build, step = self._build, str(work.number)
        try:
            agent = (await stack.open()).agent
            performer = Performer(agent, self._provide, self._scratch, build._limit, build._log)
            return await performer.perform(work.action, step)
        except (BuildFailed, GuestError, AgentLinkError, BadRequest, CopyFailed, ValueError) as error:
            if isinstance(error, BuildFailed) and error.network_missed and not build._workshop.has_network:
                build._log("it looked for a network, and builds have none on this node", level=Level.WARN, step=step)
            failure = await stack.failure(step, error)
            raise BuildFailed(step, f"Dockerfile:{work.line}: {work.title}: {failure.message}") from error

    async def _provide(self, wanted: Put) -> Supply:
        if wanted.inline:
            return await asyncio.to_thread(self._inline, wanted)
        if wanted.origin is None:
            archive = self._build._context_archive(self._recipe)
            return Supply(archive, await asyncio.to_thread(read_tree, archive, self._build._limit, digests=False))
        return await self._exported(wanted.origin, wanted)

    async def _exported(self, origin: int | str, wanted: Put) -> Supply:
        made = await self.made(origin)
        archive = self._new_archive()
        stack = Stack(self._build._workshop, self._build._log, made.layers)
        try:
            await export((await stack.open()).agent, wanted.sources, archive, self._build._limit)
        finally:
            await asyncio.shield(stack.close())
        return Supply(archive, await asyncio.to_thread(read_tree, archive, self._build._limit, digests=False), None)

    def _inline(self, wanted: Put) -> Supply:
        archive = self._new_archive()
        with tarfile.open(archive, "w") as tar:
            for name, text in wanted.inline:
                data = text.encode("utf-8", "surrogateescape")
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), 0o644
                tar.addfile(member, io.BytesIO(data))
        return Supply(archive, read_tree(archive, self._build._limit, digests=False))

    def _new_archive(self) -> Path:
        self._archives += 1
        return self._scratch / f"{self._archives}.tar"


def _images(stages: Stages, wanted: Sequence[Stage]) -> Sequence[str]:
    """Images that stages start from or take files of, each once."""
    found = {stage.base: None for stage in wanted if isinstance(stage.base, str)}
    for stage in wanted:
        for step in stage.steps:
            found |= {text: None for text in origins(step) if stages.find(text, stage.index) is None}
    return list(found)


__all__ = ["SCRATCH", "DockerBuild", "FindBase", "Recipe"]
