"""The lifecycle of sandboxes: made, kept, expired, reaped, swept, adopted after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import structlog

from sandyard.config import Settings
from sandyard.errors import (
    BadRequest,
    Conflict,
    DeathReason,
    NotFound,
    SandboxDied,
    SandyardError,
)
from sandyard.runtimes.base import Instance, Resources, Rootfs, Runtime
from sandyard.sandboxes.admission import Admission
from sandyard.sandboxes.catalog import Build, Catalog, Template
from sandyard.sandboxes.copying import KIND, Copying
from sandyard.sandboxes.expiry import Expiry
from sandyard.sandboxes.extension import Extension, NoExtension
from sandyard.sandboxes.graveyard import Graveyard
from sandyard.sandboxes.halted import HaltedInstance
from sandyard.sandboxes.leases import Lease, Leases
from sandyard.sandboxes.log import DeadLogs, SandboxLog
from sandyard.sandboxes.making import Maker
from sandyard.sandboxes.model import (
    CreateRequest,
    Defaults,
    OnTimeout,
    Sandbox,
    State,
    TimeoutPolicy,
)
from sandyard.sandboxes.pausing import Pausing
from sandyard.sandboxes.pool import Shelf, WarmPool
from sandyard.sandboxes.quota import Quota
from sandyard.sandboxes.reaping import Reaper
from sandyard.sandboxes.recovery import recover
from sandyard.sandboxes.starting import StartCommand, Starter, tell_environment
from sandyard.sandboxes.templates import TemplateSource, TemplateView
from sandyard.sandboxes.timers import Timers
from sandyard.store import Store

if TYPE_CHECKING:
    from sandyard.sandboxes.remote import RemoteSnapshots

log = structlog.get_logger("sandyard.sandboxes")

COLLECT_SECONDS = 2.0  # between the death of a sandbox and a look for layers that only it needed
HELLO_SECONDS = 2.0


async def _answers(sandbox: Sandbox) -> bool:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            await sandbox.agent.hello()
    except (SandyardError, TimeoutError):
        return False
    return True


async def _permit_nothing(_sandbox: Sandbox) -> None:
    """On a node whose sandboxes have no network."""


class SandboxManager:
    """Owns every sandbox of one server. Used from one event loop, between `start` and `stop`."""

    def __init__(self, settings: Settings, runtime: Runtime, source: TemplateSource, store: Store) -> None:
        self.settings = settings
        self.runtime = runtime
        self.store = store
        self.catalog = Catalog(source, store.catalog, settings.paths.state.absolute() / "layers")
        self.admission = Admission(settings, runtime)
        self.timers = Timers()
        self.expiry = Expiry(self.timers, settings.sandbox.max_paused, self._expire)
        self.graveyard = Graveyard(store)
        self.dead_logs = DeadLogs()
        self.leases = Leases(store, self.timers, self._lease_expired)
        self.starter = Starter(settings.sandbox.ready_timeout)
        self.maker = Maker(self)
        self.pausing = Pausing(self)
        self.reaper = Reaper(self)
        self.copying = Copying(self)
        self.quota = Quota(self)
        # Half of what the runtime starts at once: a caller always finds the other half free.
        ahead = max(runtime.starts_at_once // 2, 1)
        self.pool = WarmPool(
            runtime,
            self.admission,
            settings.pool,
            starter=self.starter,
            concurrency=ahead,
            foreground=lambda: self.maker.creating > 0,
        )
        self.on_create: list[Callable[[str, float], None]] = []  # ("warm" | "cold", seconds)
        self.on_death: list[Callable[[Sandbox, SandboxDied], None]] = []
        self.on_pause: list[Callable[[Sandbox], None]] = []  # `pause_mode` says what is left of it
        self.layer_holders: list[Callable[[], Collection[Path]]] = []  # who else needs layers that no build names
        self.extension: Extension = NoExtension()
        self.remote: RemoteSnapshots | None = None  # snapshots beyond this node
        # Lets a sandbox that was made, booted or taken over reach what its `network` allows, and nothing else.
        self.permit: Callable[[Sandbox], Awaitable[None]] = _permit_nothing
        self.catalog.on_drop = self.collect_soon
        self.catalog.on_replace = self._replaced
        self._relinking = WeakValueDictionary[str, asyncio.Lock]()  # an agent may keep silent as long as it likes
        self._sandboxes: dict[str, Sandbox] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Adopt what still lives, destroy everything else, then begin to warm the pool."""
        await self.graveyard.load(time.time())
        await self.leases.load()
        await self.catalog.load()
        await self.copying.load()
        for sandbox in await recover(self):
            if sandbox.placed:
                self.admission.hold(sandbox.resources)
                await self._permit_again(sandbox)
            self._keep(sandbox)
            sandbox.log.append("taken over after a restart of the server")
        self.reaper.start()
        self.pool.start()
        with contextlib.suppress(NotFound):  # not set up yet
            base = self.catalog.get("base")
            self.pool.warm_up(self.shelf(base))

    async def stop(self, *, keep: bool = False) -> None:
        """Stop the pool and every timer. Unless sandboxes are to be kept, those that run are destroyed, and of
        the paused ones the files stay: with nobody to watch over it, nothing may hold memory."""
        self.timers.clear()
        await self.pool.stop()
        await self.pausing.finish()
        if not keep:
            await asyncio.gather(*(self._shut(sandbox) for sandbox in list(self._sandboxes.values())))
        await self.starter.stop()
        await self.reaper.stop()
        for task in list(self._background):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.timers.clear()  # what the end of sandboxes has set

    @property
    def starting(self) -> int:
        """How many creates are waiting for the runtime now."""
        return self.maker.creating

    def resources(self) -> Resources:
        sizes = self.settings.sandbox
        return Resources(cpu=sizes.cpu, memory_mb=sizes.memory_mb, disk_mb=sizes.disk_mb, pids=sizes.pids)

    async def create(self, request: CreateRequest) -> Sandbox:
        """Make a sandbox, warm if one waits. It is recorded before this returns.

        Raises `NotFound` (template), `BadRequest` (timeout, lease), `CapacityError`, `CreateFailed`, `HostError`."""
        started = time.monotonic()
        self.check_timeout(request.timeout)
        self._check_policy(request)
        found, build = await self._resolve(request)
        template = self.catalog.view(found, build)
        self._check_lease(request.tenant, request.lease_id)
        with self.quota.sandbox(request.tenant), self.maker.holding(template.rootfs):
            return await self._create(request, found, template, started)

    async def _resolve(self, request: CreateRequest) -> tuple[Template, Build]:
        """Raises `NotFound`, and what fetching a snapshot raises that is kept elsewhere only."""
        try:
            return self.catalog.resolve(request.template, request.tenant)
        except NotFound:
            if self.remote is None or not await self.remote.fetch(request.tenant, request.template):
                raise
        return self.catalog.resolve(request.template, request.tenant)

    async def _create(self, request: CreateRequest, found: Template, template: TemplateView, started: float) -> Sandbox:
        resources = request.resources or template.resources or self.resources()
        shelf = self.pool.shelf(template, resources, keep=request.resources is None, passing=found.kind == KIND)
        instance, lines, kind = await self.maker.obtain(shelf)
        sandbox = self._new(request, template, resources, instance)
        sandbox.log = lines
        await self._promise(sandbox)
        sandbox.log.append(f"created from template {template.name}", build=template.build_id, start=kind)
        for listener in self.on_create:
            listener(kind, time.monotonic() - started)
        return sandbox

    async def spawn(self, parent: Sandbox, rootfs: Rootfs, seconds: float, *, memory: bool = False) -> Sandbox:
        """A child of `parent`, on `rootfs`: with its settings and an id of its own; with the `memory` of the topmost
        layer, or none of its processes.

        Raises `CapacityError`, `CreateFailed`, `HostError`."""
        with self.quota.sandbox(parent.tenant):
            return await self._spawn(parent, rootfs, seconds, memory)

    async def _spawn(self, parent: Sandbox, rootfs: Rootfs, seconds: float, memory: bool) -> Sandbox:
        started = time.monotonic()
        await self.maker.make_room(parent.resources)
        instance, lines = await self.maker.make(rootfs, parent.resources, parent.start, memory=memory)
        now = time.time()
        child = replace(
            parent,
            id=instance.spec.sandbox_id,
            instance=instance,
            started_at=now,
            end_at=now + seconds,
            lifetime=seconds,
            state=State.RUNNING,
            paused_at=None,
            pause_mode=None,
            placed=True,
            last_used=time.monotonic(),
            streams=0,
            death=None,
            log=lines,
        )
        await self._promise(child)
        child.log.append(f"forked from {parent.id}")
        for listener in self.on_create:
            listener("cold", time.monotonic() - started)
        return child

    def find(self, sandbox_id: str) -> Sandbox:
        """A running sandbox, whoever owns it. Raises `SandboxDied` or `NotFound`."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.state is State.RUNNING:
            return sandbox
        if sandbox is not None and sandbox.state.alive:
            raise NotFound(f"sandbox '{sandbox_id}' is {sandbox.state}")
        death = sandbox.death if sandbox is not None else self.graveyard.get(sandbox_id)
        raise death or NotFound(f"sandbox '{sandbox_id}' not found")

    def look(self, sandbox_id: str) -> Sandbox:
        """A sandbox, running or paused, whoever owns it. Raises `SandboxDied` or `NotFound`."""
        sandbox = self._sandboxes.get(sandbox_id)
        return sandbox if sandbox is not None and sandbox.state.alive else self.find(sandbox_id)

    async def reach(self, sandbox_id: str) -> Sandbox:
        """`find` for a request to a sandbox, which resumes one that traffic resumes.

        Raises what `find` and `Pausing.reach` raise."""
        await self.pausing.reach(self.look(sandbox_id))
        return self.find(sandbox_id)

    def get(self, tenant: str, sandbox_id: str) -> Sandbox:
        """A sandbox of this tenant, running or paused. Raises `SandboxDied` or `NotFound`."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.tenant == tenant:
            return self.look(sandbox_id)
        raise self.graveyard.get(sandbox_id, tenant) or NotFound(f"sandbox '{sandbox_id}' not found")

    def log(self, tenant: str, sandbox_id: str) -> SandboxLog:
        """What happened to a sandbox of this tenant, also one that died lately. Raises `NotFound`, and
        `SandboxDied` where only its death is still known."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.tenant == tenant:
            return sandbox.log
        found = self.dead_logs.get(tenant, sandbox_id)
        if found is None:
            raise self.graveyard.get(sandbox_id, tenant) or NotFound(f"sandbox '{sandbox_id}' not found")
        return found

    def all(self, tenant: str | None = None) -> Sequence[Sandbox]:
        """Running sandboxes, in no order; every tenant's where none is given."""
        return [
            s for s in self._sandboxes.values() if s.state is State.RUNNING and (tenant is None or s.tenant == tenant)
        ]

    def everyone(self, tenant: str | None = None) -> Sequence[Sandbox]:
        """The running and the paused, in no order; every tenant's where none is given."""
        return [s for s in self._sandboxes.values() if s.state.alive and (tenant is None or s.tenant == tenant)]

    def layers_in_use(self) -> set[Path]:
        """Layers that sandboxes stand on, warm ones too: not to be removed."""
        specs = [sandbox.instance.spec for sandbox in self._sandboxes.values()]
        return {layer for spec in specs for layer in spec.rootfs.layers} | self.pool.layers | self.maker.layers

    async def kill(self, sandbox_id: str, reason: DeathReason, detail: str = "") -> None:
        """Destroy a sandbox, or wait for whoever already does. Unknown ids are no error.

        Raises what `Runtime.destroy` raises; the rest is retried in the background then."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None:
            await self.reaper.kill(sandbox, reason, detail)

    async def relink(self, sandbox: Sandbox) -> None:
        """Get a new link to an agent whose link broke though the sandbox lives; kill it where that fails. One that
        is paused, or on its way there, is left alone."""
        async with self._relinking.setdefault(sandbox.id, asyncio.Lock()):
            if sandbox.state is not State.RUNNING or await _answers(sandbox) or sandbox.state is not State.RUNNING:
                return
            log.warning("agent link broke", sandbox=sandbox.id)
            instance = await self.runtime.adopt(sandbox.id)
            if sandbox.state is not State.RUNNING:
                return  # a pause came meanwhile: no link is what it should have
            if instance is None:
                await self.kill(sandbox.id, DeathReason.CRASHED, "its agent does not answer")
            else:
                sandbox.instance = instance

    async def sweep(self, tenant: str, labels: Mapping[str, str]) -> Sequence[str]:
        """Kill every sandbox of this tenant that carries all of these labels; their ids."""
        doomed = [s for s in self.everyone(tenant) if labels.items() <= dict(s.metadata).items()]
        await self.reaper.kill_all(doomed, DeathReason.KILLED, "swept by label")
        return [s.id for s in doomed]

    async def drop_lease(self, lease: Lease) -> None:
        await self.leases.drop(lease, lambda ended: self._sweep_lease(ended, DeathReason.KILLED, "its lease was ended"))

    async def set_timeout(self, sandbox: Sandbox, seconds: float, *, only_extend: bool = False) -> None:
        """Let the sandbox live `seconds` from now; 0 or less: its time is over now. The new end is recorded
        before this returns. Raises `BadRequest` for more than `sandbox.max_timeout`, `Conflict` if it is paused."""
        await self.pausing.settle(sandbox)
        if sandbox.state is State.PAUSED:
            raise Conflict(f"sandbox '{sandbox.id}' is paused", remedy="connect to it: that resumes it")
        if seconds <= 0 and not only_extend:
            await self.pausing.expire(sandbox, "its timeout was set to now")
            return
        self.check_timeout(seconds)
        end_at = time.time() + seconds
        if only_extend and end_at <= sandbox.end_at:
            return
        sandbox.end_at, sandbox.lifetime = end_at, seconds
        self.expiry.arm(sandbox)
        await self.store.set_end(sandbox.id, end_at)

    async def set_policy(self, sandbox: Sandbox, policy: TimeoutPolicy) -> None:
        """Raises `Unsupported` for a pause that the runtime cannot."""
        if policy.on_timeout is OnTimeout.PAUSE:
            self.pausing.check(memory=policy.memory)
        sandbox.policy = policy
        await self.store.set_policy(sandbox.id, policy.on_timeout.value, policy.memory, policy.auto_resume)

    def reserve(self, template: TemplateView, count: int) -> None:
        """Make up to `count` sandboxes ahead for a burst of creates that is coming."""
        self.pool.reserve(self.shelf(template), count)

    def shelf(self, template: TemplateView) -> Shelf:
        """Where sandboxes of a template wait, in the size that it has."""
        return self.pool.shelf(template, template.resources or self.resources())

    def capacity(self) -> dict[str, Any]:
        """How many sandboxes of the default size fit, and what is in the way where none does."""
        running, warm = sum(s.placed for s in self._sandboxes.values()), self.pool.ready
        why = self.admission.shortage(self.resources())
        full = why is not None and not warm
        free = 0 if full else max(self.admission.max_count - running, 0)
        return {
            "maxSandboxes": self.admission.max_count,
            "running": running,
            "warm": warm,
            "free": free,
            "reasonsIfZero": [why] if why is not None and free == 0 else [],
        }

    def retry_after(self) -> float:
        """Seconds until a place may come free: the next expiry, but not more than 5, as kills come unannounced."""
        ends = min((s.end_at for s in self.all()), default=0.0)
        return min(max(ends - time.time(), 1.0), 5.0)

    async def _promise(self, sandbox: Sandbox) -> None:
        """Record a sandbox that was made, and keep it; where that fails nothing is left of it."""
        try:
            await self.permit(sandbox)
            if sandbox.start:
                await tell_environment(sandbox.instance, sandbox.envs)
            await self.extension.started(sandbox, fresh=True)
            await self.store.add_sandbox(sandbox.record(self.runtime.name))
            self._check_lease(sandbox.tenant, sandbox.lease_id)  # it may have expired meanwhile
        except BaseException:
            await asyncio.shield(self._undo(sandbox))
            raise
        self._keep(sandbox)

    def _new(self, request: CreateRequest, template: TemplateView, resources: Resources, instance: Instance) -> Sandbox:
        now = time.time()
        return Sandbox(
            id=instance.spec.sandbox_id,
            tenant=request.tenant,
            template=template.name,
            template_id=template.template_id,
            resources=resources,
            instance=instance,
            started_at=now,
            end_at=now + request.timeout,
            lifetime=request.timeout,
            metadata=dict(request.metadata),
            envs=dict(request.envs),
            defaults=Defaults.of(template.rootfs),
            secured=request.secured,
            lease_id=request.lease_id,
            idle_timeout=request.idle_timeout,
            network=dict(request.network),
            extension=dict(request.extension),
            build_id=template.build_id,
            start=StartCommand(template.start_cmd, template.ready_cmd),
            policy=request.policy,
        )

    async def _permit_again(self, sandbox: Sandbox) -> None:
        try:
            await self.permit(sandbox)
        except SandyardError as error:  # it lives on, and reaches nothing
            log.error("sandbox has no network any more", sandbox=sandbox.id, error=str(error))

    async def _undo(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.id] = sandbox
        await self.kill(sandbox.id, DeathReason.HOST, "creation was not completed")

    def _check_policy(self, request: CreateRequest) -> None:
        """Raises `Unsupported`."""
        if request.policy.on_timeout is OnTimeout.PAUSE:
            self.pausing.check(memory=request.policy.memory)

    def check_timeout(self, seconds: float) -> None:
        """Raises `BadRequest`."""
        longest = self.settings.sandbox.max_timeout
        if seconds > longest:
            raise BadRequest(f"timeout: {seconds:g} s is more than sandbox.max_timeout, {longest:g} s", field="timeout")

    def _check_lease(self, tenant: str, lease_id: str | None) -> None:
        """Raises `BadRequest`."""
        if lease_id is None:
            return
        try:
            self.leases.get(tenant, lease_id)
        except NotFound as error:
            raise BadRequest(str(error), field="metadata.sandyard.lease") from error

    def _keep(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.id] = sandbox
        self.reaper.watch(sandbox)
        self.expiry.arm(sandbox)

    def forget(self, sandbox: Sandbox) -> None:
        """It is no more."""
        self._sandboxes.pop(sandbox.id, None)
        if any(layer.parent == self.catalog.layers_home for layer in sandbox.instance.spec.rootfs.layers):
            self.collect_soon()

    def unplace(self, sandbox: Sandbox) -> None:
        """Give its place back, if it has one."""
        if sandbox.placed:
            sandbox.placed = False
            self.admission.release(sandbox.resources)

    def _replaced(self, old: Collection[str], template: Template, build: Build) -> None:
        view = self.catalog.view(template, build)
        self.pool.supersede(old, view, view.resources or self.resources())
        self.later(self.pool.drop(old))

    def _expire(self, sandbox: Sandbox, detail: str) -> None:
        self.later(self.pausing.expire(sandbox, detail))

    def _lease_expired(self, lease: Lease) -> None:
        log.warning("lease expired", lease=lease.id, labels=dict(lease.labels))
        self.later(
            self.leases.drop(lease, lambda ended: self._sweep_lease(ended, DeathReason.LEASE, "its lease expired"))
        )

    async def _sweep_lease(self, lease: Lease, reason: DeathReason, detail: str) -> None:
        await self.reaper.kill_all([s for s in self.everyone() if s.lease_id == lease.id], reason, detail)

    async def _shut(self, sandbox: Sandbox) -> None:
        """The server stops."""
        await self.pausing.settle(sandbox)
        if sandbox.state is not State.PAUSED:
            await self.reaper.kill_quietly(sandbox, "the server was stopped")
        elif not isinstance(sandbox.instance, HaltedInstance):
            try:
                await self.pausing.forget_memory(sandbox)
            except SandyardError as error:
                await self.reaper.kill_quietly(
                    sandbox, f"the server was stopped, and its files could not be kept: {error}"
                )

    def collect_soon(self) -> None:
        """Look for layers that nothing needs any more, a moment from now."""
        self.timers.set("collect", COLLECT_SECONDS, lambda: self.later(self._collect()))

    async def _collect(self) -> None:
        await self.catalog.collect(self._layers_held(), self.runtime)
        if await self.catalog.compact(self._layers_held(), self.runtime):
            self.collect_soon()

    def _layers_held(self) -> set[Path]:
        return self.layers_in_use().union(*(holder() for holder in self.layer_holders))

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", error=str(error))
