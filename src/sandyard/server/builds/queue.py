"""The builds of a server: accepted at once, run a few at a time, each to a state that does not change again."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from sandyard.errors import BadRequest, CapacityError, Conflict, NotFound, SandyardError
from sandyard.images.build import Base, BuildFailed, Built, Engine, Level, Plan, Step
from sandyard.images.build.base import BASE_STEP, FINAL_STEP
from sandyard.images.dockerfile import DockerBuild, Means, Recipe
from sandyard.runtimes.base import Resources, Rootfs
from sandyard.sandboxes import Build, Catalog, SandboxManager, Template
from sandyard.sandboxes.starting import StartCommand
from sandyard.server.builds.bases import Bases, Origin
from sandyard.server.builds.cache import LayerCache
from sandyard.server.builds.files import FileStore
from sandyard.server.builds.gate import Gate
from sandyard.server.builds.log import BuildLog
from sandyard.server.builds.workshop import SandboxWorkshop

log = structlog.get_logger("sandyard.builds")

SAVE_SECONDS = 2.0
LOGS_KEPT = 16  # logs of finished builds that stay in memory
COLLECT_SECONDS = 3600.0
BUSY_SECONDS = 5.0
LEFTOVERS = 512  # builds of one tenant that wait for their order, or failed
WAITING_SECONDS = 86400.0  # a build that was never begun is given up after so long


@dataclass(frozen=True, slots=True)
class Order:
    """What a build is to do: a recipe, or steps from an origin."""

    origin: Origin = field(default_factory=Origin)
    steps: Sequence[Step] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None
    force: bool = False
    recipe: Recipe | None = None


class _Archives:
    """The uploads of one tenant, as the engine sees them."""

    def __init__(self, files: FileStore, tenant: str) -> None:
        self._files = files
        self._tenant = tenant

    def path(self, files_hash: str) -> Path | None:
        return self._files.path(self._tenant, files_hash)


class Builds:
    """Used from one event loop, between `start` and `stop`."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._settings = manager.settings.build
        home = manager.settings.paths.state.absolute()
        self.files = FileStore(home / "files", self._settings)
        self.cache = LayerCache(home / "builds" / "cache.json")
        self.bases = Bases(manager.settings, manager.catalog)
        self._logs_home = home / "builds"
        self._scratch = home / "builds" / "scratch"
        self._logs: OrderedDict[str, BuildLog] = OrderedDict()
        self._gate = Gate(self._settings.at_once)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        manager.layer_holders.append(lambda: self.cache.layers)

    @property
    def _catalog(self) -> Catalog:
        return self._manager.catalog

    async def start(self) -> None:
        """Read the cache and remove layers that a killed server left to nobody."""
        await asyncio.to_thread(shutil.rmtree, self._scratch, True)  # what a killed server left
        await asyncio.to_thread(self.cache.load)
        await self.collect()
        self._keeper = asyncio.create_task(self._keep(), name="builds-keeper")

    async def stop(self) -> None:
        """End every build, which makes it an error, and its sandboxes."""
        for task in [self._keeper, *self._tasks.values()]:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._keeper = None
        self.files.close()

    # --- what callers do ---

    async def register(self, template: Template, tags: Sequence[str], resources: Resources) -> Build:
        """A build that waits for its order. Raises `Conflict` where one with such a tag is under way, and
        `CapacityError` where the tenant has as many as it may."""
        self._check_free(template, tags)
        self._check_count(template)
        await self._drop_leftovers(template)
        sizes = {"cpu": resources.cpu, "memory_mb": resources.memory_mb}
        sizes |= {"disk_mb": resources.disk_mb, "pids": resources.pids}
        config: dict[str, Any] = {"resources": sizes, "tags": list(tags)}
        return await self._catalog.put_build(
            Build(str(uuid.uuid4()), template.id, "waiting", Rootfs(()), config, time.time())
        )

    def check_room(self, tenant: str) -> None:
        """Raises `CapacityError` where the tenant has as many templates as it may."""
        count = sum(t.tenant == tenant and t.kind == "template" for t in self._catalog.all(tenant))
        if count >= self._settings.templates:
            raise CapacityError(
                f"there are {count} templates of yours already (build.templates)",
                retry_after=BUSY_SECONDS,
                remedy="delete some",
            )

    async def begin(self, template: Template, build: Build, order: Order) -> None:
        """Queue a registered build. Raises `BadRequest` unless it waits, and `Conflict` as `register` does."""
        if build.status != "waiting":
            raise BadRequest(f"build '{build.id}' is not in waiting state: it is {build.status}")
        self._check_free(template, build.config.get("tags", ()))
        self._check_count(template)
        say = self._logs[build.id] = BuildLog(self._log_path(build.id), self._settings.log_lines)
        begun = replace(build, status="building")
        template.builds[build.id] = begun  # before the wait, so that it cannot be begun twice
        await self._catalog.put_build(begun)
        task = asyncio.create_task(self._run(template, begun, order, say), name=f"build-{build.id}")
        self._tasks[build.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(build.id, None))

    async def cancel(self, template: Template) -> None:
        """End the template's builds; returns when nothing of them runs."""
        tasks = [task for build_id in template.builds if (task := self._tasks.get(build_id)) is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def delete(self, template: Template) -> None:
        """Delete a template or a snapshot with all that only it needs. Sandboxes of a snapshot go on, on their
        layers. Raises `BadRequest` while sandboxes of a template live, and for the node's own."""
        users = [s for s in self._manager.everyone() if s.template_id == template.id]
        if users and template.kind == "template":
            # Of others no more than their number: an id is all it takes to use a sandbox that is not secured.
            mine = [s.id for s in users if s.tenant == template.tenant]
            named = f" ({', '.join(mine[:3])}{', …' if len(users) > 3 else ''})" if mine else ""
            others = f", {len(users) - len(mine)} of other tenants" if len(users) > len(mine) else ""
            raise BadRequest(
                f"template '{template.name}' cannot be deleted: {len(users)} sandboxes use it{others}{named}",
                remedy="kill them first" if mine else "make it private, and wait for them to end",
            )
        await self.cancel(template)
        await self._catalog.delete(template)
        await self._forget(list(template.builds))
        await self.collect()

    async def delete_tagged(self, snapshot: Template, tag: str) -> None:
        """Delete one state of a snapshot, and the snapshot with its last. Raises `NotFound`."""
        build = snapshot.build(tag)
        if build is None:
            raise NotFound(f"tag '{tag}' does not exist for snapshot '{snapshot.name}'")
        if tag in snapshot.tags:
            await self._catalog.drop_tags(snapshot, [tag])
        if all(named != build.id for named, _ in snapshot.tags.values()):
            await self._catalog.drop_build(snapshot, build.id)
        if not snapshot.builds:
            await self._catalog.delete(snapshot)
        await self._forget([build.id] if build.id not in snapshot.builds else [])
        await self.collect()

    async def _forget(self, build_ids: Sequence[str]) -> None:
        await self._manager.pool.drop(build_ids)
        for build_id in build_ids:
            self._logs.pop(build_id, None)
            await asyncio.to_thread(self._log_path(build_id).unlink, True)

    async def log_of(self, build: Build) -> BuildLog:
        known = self._logs.get(build.id)
        if known is None:
            limit = self._settings.log_lines
            known = await asyncio.to_thread(BuildLog.load, self._log_path(build.id), limit)
            self._logs[build.id] = known
        self._logs.move_to_end(build.id)
        finished = [build_id for build_id in self._logs if build_id not in self._tasks]
        for build_id in finished[: max(len(finished) - LOGS_KEPT, 0)]:
            del self._logs[build_id]
        return known

    async def collect(self) -> None:
        """Remove layers that nothing names any more, and uploads that are long unused."""
        await self.files.collect()
        await self._retire(time.time())
        named = {layer for t in self._catalog.all() for b in t.builds.values() for layer in b.rootfs.layers}
        limit, home = self._settings.cache_mb << 20, self._catalog.layers_home
        await asyncio.to_thread(self.cache.shrink, limit, named, home)
        await self._save_cache()
        held = {layer for holder in self._manager.layer_holders for layer in holder()}
        await self._catalog.collect(held | self._manager.layers_in_use(), self._manager.runtime)

    async def _retire(self, now: float) -> None:
        """Give up builds that were never begun, and forget those that failed or lost their tags long ago."""
        oldest = now - self._settings.untagged_days * 86400
        for template in self._catalog.all():
            if template.kind != "template" or template.tenant is None:
                continue
            tagged = {build_id for build_id, _ in template.tags.values()}
            for build in list(template.builds.values()):
                if build.status == "waiting" and build.created_at < now - WAITING_SECONDS:
                    await self._catalog.put_build(_failed(build, None, "it was registered and never begun"))
                elif build.status in ("ready", "error") and build.id not in tagged and build.created_at < oldest:
                    await self._catalog.drop_build(template, build.id)
                    await self._forget([build.id])

    async def _drop_leftovers(self, template: Template) -> None:
        """Builds that came to nothing cost nothing to make: the oldest of them go once a tenant has many."""
        mine = [t for t in self._catalog.all(template.tenant) if t.tenant == template.tenant and t.kind == "template"]
        found = [(b.created_at, t, b) for t in mine for b in t.builds.values() if b.status in ("waiting", "error")]
        for _, owner, build in sorted(found, key=lambda item: item[0])[: max(len(found) - LEFTOVERS + 1, 0)]:
            if owner.builds.get(build.id) is build:  # and was not begun meanwhile
                await self._catalog.drop_build(owner, build.id)
                await self._forget([build.id])

    # --- one build ---

    async def _run(self, template: Template, build: Build, order: Order, say: BuildLog) -> None:
        saver = asyncio.create_task(self._save_often(say))
        try:
            ended = await self._attempt(template, build, order, say)
        except asyncio.CancelledError:
            await self._end(template, _failed(build, None, "the build was cancelled"), say)
            raise
        finally:
            saver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await saver
            await self._save_cache()  # what a failed build came to is of use to the next one
        await self._end(template, ended, say)

    async def _attempt(self, template: Template, build: Build, order: Order, say: BuildLog) -> Build:
        """The build as it ended; only a cancellation passes."""
        try:
            assert template.tenant is not None  # builds are of tenants only
            async with (
                self._gate.place(template.tenant, lambda: say("waiting for another build to end", step=BASE_STEP)),
                asyncio.timeout(self._settings.timeout),  # of its own: others' builds are no fault of it
            ):
                return await self._build(template, build, order, say)
        except BuildFailed as error:
            return self._error(build, error.step, error.message, say)
        except TimeoutError:
            return self._error(build, None, f"the build took longer than {self._settings.timeout:g} s", say)
        except SandyardError as error:
            log.warning("build failed", build=build.id, error=str(error))
            return self._error(build, None, str(error), say)
        except Exception:  # a fault of ours must not leave a build that never ends
            log.exception("internal error in a build", build=build.id)
            return self._error(build, None, "internal error; the server's log says more", say)

    async def _build(self, template: Template, build: Build, order: Order, say: BuildLog) -> Build:
        assert template.tenant is not None  # builds are of tenants only
        began = time.monotonic()
        sizes = Resources(**build.config["resources"])
        roomy = replace(sizes, disk_mb=max(sizes.disk_mb, self._settings.disk_mb), pids=max(sizes.pids, 4096))
        async with contextlib.AsyncExitStack() as stack:
            workshop = stack.enter_context(SandboxWorkshop(self._manager, roomy, say))
            await stack.enter_async_context(self.bases.holding())
            built = await self._built(workshop, template.tenant, order, say)
            start = StartCommand(built.start_cmd, built.ready_cmd)
            ready = _ready(build, built, await workshop.remember(built.rootfs, sizes, start))
            say(f"built in {time.monotonic() - began:.1f} s, {built.size_bytes >> 10} KiB added", step=FINAL_STEP)
            await self._catalog.put_build(ready)
            await self._catalog.set_tags(template, build.id, build.config.get("tags", ()))
        return ready

    async def _built(self, workshop: SandboxWorkshop, tenant: str, order: Order, say: BuildLog) -> Built:
        archives = _Archives(self.files, tenant)
        if order.recipe is None:
            base = await self.bases.find(order.origin, tenant, say)
            plan = Plan(base, order.steps, order.start_cmd, order.ready_cmd, order.force)
            engine = Engine(workshop, archives, self.cache, say)
            return await engine.run(plan, ready_seconds=self._settings.ready_timeout)

        async def find(name: str) -> Base:
            return await self.bases.from_dockerfile(name, tenant, say)

        means = Means(workshop, archives, self.cache, say, self._settings.disk_mb << 20)
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = DockerBuild(means, find, self._scratch)
        return await made.run(order.recipe, ready_seconds=self._settings.ready_timeout)

    def _error(self, build: Build, step: str | None, message: str, say: BuildLog) -> Build:
        say(message, level=Level.ERROR, step=step)
        return _failed(build, step, message)

    async def _end(self, template: Template, ended: Build, say: BuildLog) -> None:
        try:
            await asyncio.to_thread(say.save)
            if ended.status != "ready":
                await self._catalog.put_build(ended)
        except NotFound:
            pass  # its template was deleted meanwhile
        except (SandyardError, OSError) as error:
            log.error("the end of a build could not be recorded", build=ended.id, error=str(error))
            template.builds[ended.id] = ended

    def _check_count(self, template: Template) -> None:
        mine = [t for t in self._catalog.all(template.tenant) if t.tenant == template.tenant]
        running = sum(build.status == "building" for t in mine for build in t.builds.values())
        if running >= self._settings.per_tenant:
            raise CapacityError(
                f"maximum number of concurrent template builds reached: {running} (build.per_tenant)",
                retry_after=BUSY_SECONDS,
            )

    def _check_free(self, template: Template, tags: Sequence[str]) -> None:
        for other in template.builds.values():
            shared = set(other.config.get("tags", ())) & set(tags)
            if other.status == "building" and shared:
                raise Conflict(
                    f"build '{other.id}' of template '{template.name}' with tag '{min(shared)}' is under way",
                    remedy="wait for it, or delete the template",
                )

    async def _save_cache(self) -> None:
        try:
            await asyncio.to_thread(self.cache.save)
        except OSError as error:
            log.error("the layer cache could not be saved", error=str(error))

    async def _save_often(self, say: BuildLog) -> None:
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            try:
                await asyncio.to_thread(say.save)
            except OSError as error:
                log.error("the log of a build could not be saved", error=str(error))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_SECONDS)
            try:
                await self.collect()
            except (SandyardError, OSError) as error:
                log.error("layers could not be collected", error=str(error))

    def _log_path(self, build_id: str) -> Path:
        return self._logs_home / f"{build_id}.log"


def _ready(build: Build, built: Built, memory: tuple[Rootfs, int] | None) -> Build:
    """`memory`: where its sandboxes start from with the memory of one that was ready, and its bytes."""
    commands = {"start_cmd": built.start_cmd, "ready_cmd": built.ready_cmd}
    known = {**commands, "oci": built.oci}
    config = {**build.config, **{name: value for name, value in known.items() if value is not None}}
    rootfs, size = (built.rootfs, 0) if memory is None else memory
    if memory is not None:
        config["memory"] = True
    return replace(
        build,
        status="ready",
        rootfs=rootfs,
        config=config,
        finished_at=time.time(),
        size_bytes=built.size_bytes + size,
    )


def _failed(build: Build, step: str | None, message: str) -> Build:
    reason = {"message": message} if step is None else {"message": message, "step": step}
    return replace(build, status="error", reason=reason, finished_at=time.time())
