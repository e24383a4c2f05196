"""A Dockerfile's build: stages in their order, each in sandboxes of its own, layers kept by content.

What a sandbox needs beyond the image (the account `user`) is added above the last stage, as for every template.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from sandyard.errors import AgentLinkError, BadRequest, GuestError
from sandyard.images.build.accounts import is_dir, make_dir, prepare
from sandyard.images.build.base import (
    BASE_STEP,
    Base,
    BuildFailed,
    Built,
    Cached,
    Level,
    State,
)
from sandyard.images.build.chain import then
from sandyard.images.build.stack import Stack
from sandyard.images.build.start import settle
from sandyard.images.dockerfile.actions import Planned
from sandyard.images.dockerfile.config import ImageSettings, scratch_env
from sandyard.images.dockerfile.making import Maker, Means, Plans, Recipe
from sandyard.images.dockerfile.performing import process_user
from sandyard.images.dockerfile.plan import Planner
from sandyard.images.dockerfile.stages import Stage, Stages, origins, split, unused_args
from sandyard.images.dockerfile.syntax import DockerfileError
from sandyard.images.dockerfile.tree import Tree, read_tree

READY = "sleep 3"  # a start command of which only the Dockerfile tells gets that long to fail

FindBase = Callable[[str], Awaitable[Base]]
"""An image by the name that a Dockerfile has for it; `scratch` has no files. Raises `BuildFailed`."""


class DockerBuild:
    """One build. Everything it opens is closed when `run` ends, however that is. `scratch`: a directory for archives
    on their way, the system's own if None."""

    def __init__(self, means: Means, find: FindBase, scratch: Path | None = None) -> None:
        self._means = means
        self._find = find
        self._scratch = scratch
        self._plans = Plans()

    async def run(self, recipe: Recipe, *, ready_seconds: float = 600.0) -> Built:
        """Raises `BuildFailed` naming the step and the line; what the workshop raises passes."""
        with tempfile.TemporaryDirectory(prefix="sandyard-build-", dir=self._scratch) as scratch:
            return await self._run(recipe, Path(scratch), ready_seconds)

    async def planned(self, recipe: Recipe) -> Planned:
        """The last stage as it would be built. Raises `BuildFailed`."""
        try:
            return await self._plan(recipe)
        except DockerfileError as error:
            raise BuildFailed(BASE_STEP, str(error)) from error

    async def stage(self, recipe: Recipe) -> tuple[Sequence[Path], ImageSettings]:
        """The layers of the last stage, with nothing added, and its settings. Raises as `run` does."""
        with tempfile.TemporaryDirectory(prefix="sandyard-build-", dir=self._scratch) as scratch:
            last = await self.planned(recipe)
            maker = Maker(self._means, self._plans, recipe, Path(scratch))
            return (await maker.made(last.index)).layers, last.settings

    async def _run(self, recipe: Recipe, scratch: Path, ready_seconds: float) -> Built:
        last = await self.planned(recipe)
        maker = Maker(self._means, self._plans, recipe, scratch)
        made = await maker.made(last.index)
        base = self._plans.root(last)
        stack = Stack(self._means.workshop, self._means.log, made.layers, made.size)
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
                stack, self._means.cache, self._means.log, tried, state, start, READY if implied else ready,
                fresh=recipe.force, ready_seconds=ready_seconds,
            )  # fmt: skip
            rootfs = state.rootfs(stack.layers)
            oci = last.settings.oci()
            return Built(rootfs, stack.size, maker.cached, start, None if implied else waits, oci)
        finally:
            await asyncio.shield(stack.close())

    async def _finish(self, recipe: Recipe, last: Planned, base: Base, stack: Stack) -> State:
        """What every template has, above the last stage; where its sandboxes begin."""
        settings = last.settings
        # Of the settings, only these two decide what is done here; variables are no file's business.
        workdir = settings.workdir or base.rootfs.workdir or "/"
        user = settings.user or base.rootfs.user or ""
        key = then(last.key, "FINISH", [workdir, user])
        known = self._means.cache.get(key) if not recipe.force else None
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
        self._means.cache.put(key, Cached(tuple(stack.layers), State({}, state.workdir, state.user), stack.size))
        return state

    # --- before anything runs ---

    async def _plan(self, recipe: Recipe) -> Planned:
        stages = split(recipe.file, recipe.build_args)
        target = stages.target(recipe.target)
        wanted = stages.needed(target)
        for name in unused_args(stages):
            self._means.log(f"no ARG declares the build argument {name}", level=Level.WARN, step=BASE_STEP)
        for name in _images(stages, wanted):
            self._plans.bases[name] = await self._find(name)
        context = await self._context(recipe)
        planner = Planner(stages, context, self._plans.key_of, network=self._means.workshop.has_network)
        number = 1
        for stage in wanted:
            planned = planner.plan(stage, self._settings_of(stage), number)
            self._plans.stages[stage.index] = planned
            number += len(planned.works)
        self._plans.total = number - 1
        if not self._means.workshop.has_network:
            self._means.log("builds have no network on this node", level=Level.DEBUG, step=BASE_STEP)
        return self._plans.stages[target.index]

    def _settings_of(self, stage: Stage) -> ImageSettings:
        if isinstance(stage.base, int):
            return self._plans.stages[stage.base].settings
        base = self._plans.bases[stage.base]
        if base.oci is not None:
            return ImageSettings.of(base.oci)
        # Made by no Dockerfile: as an image that sets variables only, so that a build begins as root.
        return ImageSettings(env={**scratch_env(), **base.rootfs.env})

    async def _context(self, recipe: Recipe) -> Tree | None:
        if recipe.context is None:
            return None
        archive = self._means.context(recipe)
        try:
            return await asyncio.to_thread(read_tree, archive, self._means.limit)
        except BadRequest as error:
            raise BuildFailed(BASE_STEP, f"the build context: {error.message}") from error


def check(recipe: Recipe) -> None:
    """Raises `BadRequest` for what can be seen without a base: the order of stages, the target, platforms."""
    split(recipe.file, recipe.build_args).target(recipe.target)


def _images(stages: Stages, wanted: Sequence[Stage]) -> Sequence[str]:
    """Images that stages start from or take files of, each once."""
    found = {stage.base: None for stage in wanted if isinstance(stage.base, str)}
    for stage in wanted:
        for step in stage.steps:
            found |= {text: None for text in origins(step) if stages.find(text, stage.index) is None}
    return list(found)
