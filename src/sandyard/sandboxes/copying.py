"""Snapshots and forks: sandboxes that start where another one stood, with its files and where it can be its memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandyard.errors import Conflict, NotFound, SandyardError, Unsupported
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.finishing import finish
from sandyard.sandboxes.catalog import DEFAULT_TAG, Build, Reference, Template, check_name, check_new_tag
from sandyard.sandboxes.model import PauseMode, Sandbox

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

KIND = "snapshot"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One tag of a snapshot template, and the build that it names."""

    template: Template
    tag: str
    build: Build

    @property
    def id(self) -> str:
        return f"{self.template.name}:{self.tag}"

    @property
    def names(self) -> Sequence[str]:
        return [f"{name}:{self.tag}" for name in self.template.names]

    @property
    def memory(self) -> bool:
        """Whether its sandboxes go on with its processes."""
        return bool(self.build.config.get("memory"))

    @property
    def source(self) -> str:
        """Id of the sandbox it was taken of."""
        return str(self.build.config.get("source", ""))


class Copying:
    """What is copied is the files and, where the runtime can, the memory. Without memory every copy runs its start
    command anew."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._naming = asyncio.Lock()

    def check(self, sandbox: Sandbox, *, memory: bool) -> None:
        """`memory`: it is demanded. Raises `Unsupported` where the runtime cannot, or the sandbox has none."""
        runtime = self._manager.runtime
        if memory and not runtime.capabilities.memory_snapshot:
            raise Unsupported(
                f"runtime {runtime.name} cannot snapshot a sandbox with its memory", remedy="leave memory out, or false"
            )
        if memory and not self.keeps_memory(sandbox):
            raise Unsupported(f"sandbox '{sandbox.id}' is paused without its memory", remedy="resume it first")
        if not runtime.capabilities.file_snapshot:
            raise Unsupported(f"runtime {runtime.name} cannot snapshot a sandbox")

    def keeps_memory(self, sandbox: Sandbox) -> bool:
        """Whether a copy of it, as it is now, has its memory."""
        can = self._manager.runtime.capabilities.memory_snapshot
        return can and sandbox.pause_mode is not PauseMode.FILESYSTEM

    async def load(self) -> None:
        """After a restart: what a snapshot had come to that nobody was told of is dropped."""
        catalog = self._manager.catalog
        for template in [template for template in catalog.all() if template.kind == KIND]:
            named = {build_id for build_id, _ in template.tags.values()}
            for build_id in template.builds.keys() - named:
                await catalog.drop_build(template, build_id)
            if not template.builds:
                await catalog.delete(template)

    async def snapshot(self, sandbox: Sandbox, name: str | None = None) -> Snapshot:
        """Keep the state of a sandbox, running or paused, for others to start from. A `name` that is a snapshot's
        already gets this state in place of the one that had the tag.

        Raises `BadRequest` (name), `Conflict` (the name is a template's), `CapacityError` (its tenant has as much
        as it may), `Unsupported`, `SandboxError`."""
        manager = self._manager
        self.check(sandbox, memory=False)
        names, tag = _names(name)
        self._known(sandbox.tenant, names)
        began = time.monotonic()
        # Whoever kills the sandbox meanwhile must not take what lies below from its copies.
        below, parent = sandbox.instance.spec.rootfs, self._last_layer(sandbox)
        held = replace(below, layers=[*below.layers, *([parent] if parent else [])])
        with manager.quota.snapshot(sandbox), manager.catalog.new_layer() as path, manager.maker.holding(held):
            rootfs, size, memory = await self._commit(sandbox, path, durable=True, parent=parent)
            async with self._naming:  # two of one new name are one snapshot with two states
                template = self._known(sandbox.tenant, names) or await manager.catalog.add_template(
                    sandbox.tenant, KIND, names, source=sandbox.id
                )
            try:
                build = await manager.catalog.put_build(_build(sandbox, template, rootfs, size, memory))
                replaced = template.build(tag)
                await manager.catalog.set_tags(template, build.id, [tag])
            except BaseException:
                if not template.tags:
                    with contextlib.suppress(SandyardError):  # the failure before it is the one to tell
                        await manager.catalog.delete(template)
                raise
            if replaced is not None:
                await self.drop_untagged(template, replaced)
        made = Snapshot(template, tag, build)
        sandbox.log.append(
            f"snapshot {made.id}", seconds=f"{time.monotonic() - began:.3f}", bytes=str(size), build=build.id
        )
        if manager.remote is not None:
            await manager.remote.made(made)
        return made

    async def fork(self, sandbox: Sandbox, count: int, seconds: float) -> Sequence[Sandbox | SandyardError]:
        """`count` sandboxes with the state this one has now, each to live `seconds`; for each that did not
        become one, why. Raises like `snapshot` where not even a copy of the state could be made."""
        manager = self._manager
        manager.check_timeout(seconds)
        self.check(sandbox, memory=False)
        began = time.monotonic()
        with manager.catalog.new_layer() as path, manager.maker.holding(sandbox.instance.spec.rootfs):
            # Its children do not outlive a crash of the host; one that is halted brings its layers to the disk.
            rootfs, _, memory = await self._commit(sandbox, path, durable=False, parent=None)
            spawned = (manager.spawn(sandbox, rootfs, seconds, memory=memory) for _ in range(count))
            work = [asyncio.create_task(child) for child in spawned]
            try:
                children = await asyncio.gather(*(_outcome(task) for task in work))
            except BaseException:
                await finish(_undo(work, manager))
                raise
        manager.collect_soon()
        good = sum(isinstance(child, Sandbox) for child in children)
        sandbox.log.append(f"forked {good} of {count}", seconds=f"{time.monotonic() - began:.3f}")
        return children

    def all(self, tenant: str) -> Sequence[Snapshot]:
        """The tenant's snapshots, the newest first; a name with several tags is several."""
        found = [
            Snapshot(template, tag, build)
            for template in self._manager.catalog.all(tenant)
            if template.kind == KIND and template.tenant == tenant
            for tag in template.tags
            if (build := template.build(tag)) is not None and build.status == "ready"
        ]
        return sorted(found, key=lambda snapshot: (snapshot.build.created_at, snapshot.id), reverse=True)

    def get(self, tenant: str, reference: str) -> Snapshot:
        """By name or id, with or without a tag. Raises `NotFound`."""
        template, build = self._manager.catalog.resolve(reference, tenant)
        if template.kind != KIND or template.tenant != tenant:
            raise NotFound(f"snapshot '{reference}' not found")
        return Snapshot(template, Reference.parse(reference).tag or DEFAULT_TAG, build)

    async def _commit(
        self, sandbox: Sandbox, path: Path, *, durable: bool, parent: Path | None
    ) -> tuple[Rootfs, int, bool]:
        """What a copy stands on, its bytes, and whether it has the memory."""
        await self._manager.pausing.settle(sandbox)
        if not sandbox.state.alive:
            raise sandbox.death or NotFound(f"sandbox '{sandbox.id}' not found")
        rootfs = sandbox.instance.spec.rootfs
        memory = self.keeps_memory(sandbox)
        size = await sandbox.instance.commit(path, durable=durable, parent=parent, memory=memory)
        return replace(rootfs, layers=[path, *rootfs.layers]), size, memory

    def _last_layer(self, sandbox: Sandbox) -> Path | None:
        """What the last snapshot of its disk is, if there is one: the next needs to hold the difference only."""
        layers = list(sandbox.instance.spec.rootfs.layers)
        made = (snapshot.build.rootfs.layers for snapshot in self.all(sandbox.tenant) if snapshot.source == sandbox.id)
        return next((last for last, *below in made if below == layers), None)

    async def drop_untagged(self, template: Template, build: Build) -> None:
        """A state that no tag names any more is nobody's; sandboxes that stand on it keep its layers."""
        if all(named != build.id for named, _ in template.tags.values()):
            await self._manager.catalog.drop_build(template, build.id)
            await self._manager.pool.drop([build.id])
            self._manager.collect_soon()

    def _known(self, tenant: str, names: Sequence[str]) -> Template | None:
        for name in names:
            with contextlib.suppress(NotFound):
                template = self._manager.catalog.find(name, tenant)
                if template.tenant == tenant and template.kind == KIND:
                    return template
                if template.tenant in (tenant, None):
                    raise Conflict(f"name '{name}' already points to template {template.id}", remedy="take another")
        return None


def _names(name: str | None) -> tuple[list[str], str]:
    """The names of a new snapshot, and its tag. Raises `BadRequest`."""
    if name is None or not name.strip():
        return [], DEFAULT_TAG
    reference = Reference.parse(name)
    tag = check_new_tag(reference.tag) if reference.tag is not None else DEFAULT_TAG
    return [check_name(reference.name)], tag


def _build(sandbox: Sandbox, template: Template, rootfs: Rootfs, size: int, memory: bool) -> Build:
    sizes = sandbox.resources
    resources = {"cpu": sizes.cpu, "memory_mb": sizes.memory_mb, "disk_mb": sizes.disk_mb, "pids": sizes.pids}
    config: dict[str, Any] = {
        **sandbox.start.record(),
        "resources": resources,
        "source": sandbox.id,
        "template": sandbox.template,
    }
    config |= {"memory": True} if memory else {}
    now = time.time()
    return Build(str(uuid.uuid4()), template.id, "ready", rootfs, config, now, now, None, size)


async def _outcome(task: asyncio.Task[Sandbox]) -> Sandbox | SandyardError:
    try:
        return await asyncio.shield(task)
    except SandyardError as error:
        return error


async def _undo(work: Sequence[asyncio.Task[Sandbox]], manager: SandboxManager) -> None:
    """Nobody waits for these any more."""
    await asyncio.wait(work)
    for task in work:
        if not task.cancelled() and task.exception() is None:
            await manager.reaper.kill_quietly(task.result(), "its fork was called off")
