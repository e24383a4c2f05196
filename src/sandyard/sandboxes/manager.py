"""The lifecycle of sandboxes: made, kept, expired, reaped, swept, adopted after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from sandyard.config import Settings
from sandyard.errors import BadRequest, DeathReason, HostError, NotFound, SandboxDied, SandboxError, SandyardError
from sandyard.runtimes.base import Instance, Resources, Runtime, SandboxSpec
from sandyard.sandboxes.admission import Admission
from sandyard.sandboxes.catalog import Catalog
from sandyard.sandboxes.extension import Extension, NoExtension
from sandyard.sandboxes.graveyard import Graveyard
from sandyard.sandboxes.leases import Lease, Leases
from sandyard.sandboxes.log import DeadLogs, Level, SandboxLog
from sandyard.sandboxes.model import CreateRequest, Defaults, Sandbox, State, new_id
from sandyard.sandboxes.pool import Shelf, WarmPool
from sandyard.sandboxes.recovery import recover
from sandyard.sandboxes.stragglers import Stragglers
from sandyard.sandboxes.templates import TemplateSource, TemplateView
from sandyard.sandboxes.timers import Timers
from sandyard.store import DeathRecord, Store

log = structlog.get_logger("sandyard.sandboxes")

KILLS_AT_ONCE = 16
DESTROY_SECONDS = 20.0
HELLO_SECONDS = 2.0


async def _answers(sandbox: Sandbox) -> bool:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            await sandbox.agent.hello()
    except (SandyardError, TimeoutError):
        return False
    return True


class SandboxManager:
    """Owns every sandbox of one server. Used from one event loop, between `start` and `stop`."""

    def __init__(self, settings: Settings, runtime: Runtime, source: TemplateSource, store: Store) -> None:
        self.settings = settings
        self.runtime = runtime
        self.store = store
        self.catalog = Catalog(source, store.catalog, settings.paths.state.absolute() / "layers")
        self.admission = Admission(settings)
        self.timers = Timers()
        self.graveyard = Graveyard(store)
        self.dead_logs = DeadLogs()
        self.leases = Leases(store, self.timers, self._lease_expired)
        # Half of what the runtime starts at once: a caller always finds the other half free.
        ahead = max(runtime.starts_at_once // 2, 1)
        self.pool = WarmPool(
            runtime, self.admission, settings.pool, concurrency=ahead, foreground=lambda: self._creating > 0
        )
        self.on_create: list[Callable[[str, float], None]] = []  # ("warm" | "cold", seconds)
        self.on_death: list[Callable[[Sandbox, SandboxDied], None]] = []
        self.extension: Extension = NoExtension()
        self._stragglers = Stragglers(runtime)
        self._kills_at_once = asyncio.Semaphore(KILLS_AT_ONCE)
        self._relinking = asyncio.Lock()
        self._sandboxes: dict[str, Sandbox] = {}
        self._kills: dict[str, asyncio.Task[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._creating = 0

    async def start(self) -> None:
        """Adopt what still lives, destroy everything else, then begin to warm the pool."""
        await self.graveyard.load(time.time())
        await self.leases.load()
        await self.catalog.load()
        for sandbox in await recover(self):
            self.admission.hold(sandbox.resources)
            self._keep(sandbox)
            sandbox.log.append("taken over after a restart of the server")
        self._stragglers.start()
        self.pool.start()
        with contextlib.suppress(NotFound):  # not set up yet
            base = self.catalog.get("base")
            self.pool.warm_up(self.pool.shelf(base.build_id, base.rootfs, self.resources()))

    async def stop(self, *, keep: bool = False) -> None:
        """Stop the pool and every timer; destroy the sandboxes unless they are to be kept."""
        self.timers.clear()
        await self.pool.stop()
        if not keep:
            await self._kill_all(list(self._sandboxes), DeathReason.HOST, "the server was stopped")
        for task in [*self._watches.values(), *self._background]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._stragglers.stop()

    @property
    def starting(self) -> int:
        """How many creates are waiting for the runtime now."""
        return self._creating

    def resources(self) -> Resources:
        sizes = self.settings.sandbox
        return Resources(cpu=sizes.cpu, memory_mb=sizes.memory_mb, disk_mb=sizes.disk_mb, pids=sizes.pids)

    async def create(self, request: CreateRequest) -> Sandbox:
        """Make a sandbox, warm if one waits. It is recorded before this returns.

        Raises `NotFound` (template), `BadRequest` (timeout, lease), `CapacityError`, `CreateFailed`, `HostError`."""
        started = time.monotonic()
        self._check_timeout(request.timeout)
        template = self.catalog.get(request.template, request.tenant)
        if request.lease_id is not None:
            self._check_lease(request)
        resources = request.resources or self.resources()
        shelf = self.pool.shelf(template.build_id, template.rootfs, resources, keep=request.resources is None)
        instance = self.pool.take(shelf)
        kind = "cold" if instance is None else "warm"
        if instance is None:
            instance = await self._place(shelf) or await self._make(template, resources)
        sandbox = self._new(request, template, resources, instance)
        try:
            await self.extension.started(sandbox, fresh=True)
            await self.store.add_sandbox(sandbox.record(self.runtime.name))
            if request.lease_id is not None:
                self._check_lease(request)  # it may have expired meanwhile
        except BaseException:
            await asyncio.shield(self._undo(sandbox))
            raise
        self._keep(sandbox)
        sandbox.log.append(f"created from template {template.name}", build=template.build_id, start=kind)
        for listener in self.on_create:
            listener(kind, time.monotonic() - started)
        return sandbox

    def find(self, sandbox_id: str) -> Sandbox:
        """A running sandbox, whoever owns it. Raises `SandboxDied` or `NotFound`."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.state is State.RUNNING:
            return sandbox
        death = sandbox.death if sandbox is not None else self.graveyard.get(sandbox_id)
        raise death or NotFound(f"sandbox '{sandbox_id}' not found")

    def get(self, tenant: str, sandbox_id: str) -> Sandbox:
        """A running sandbox of this tenant. Raises `SandboxDied` or `NotFound`."""
        sandbox = self._sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.tenant == tenant:
            return self.find(sandbox_id)
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

    def layers_in_use(self) -> set[Path]:
        """Layers that sandboxes stand on, warm ones too: not to be removed."""
        specs = [sandbox.instance.spec for sandbox in self._sandboxes.values()]
        return {layer for spec in specs for layer in spec.rootfs.layers} | self.pool.layers

    async def kill(self, sandbox_id: str, reason: DeathReason, detail: str = "") -> None:
        """Destroy a sandbox, or wait for whoever already does. Unknown ids are no error.

        Raises what `Runtime.destroy` raises; the rest is retried in the background then."""
        task = self._kills.get(sandbox_id)
        if task is None:
            sandbox = self._sandboxes.get(sandbox_id)
            if sandbox is None:
                return
            # Set before the first await: from here on the data plane answers that it is dead.
            sandbox.state = State.KILLING
            sandbox.death = SandboxDied(sandbox_id, reason, detail)
            task = self._kills[sandbox_id] = asyncio.create_task(self._kill(sandbox, sandbox.death))
            task.add_done_callback(lambda _: self._kills.pop(sandbox_id, None))
        await asyncio.shield(task)

    async def relink(self, sandbox: Sandbox) -> None:
        """Get a new link to an agent whose link broke though the sandbox lives; kill it where that fails."""
        async with self._relinking:
            if sandbox.state is not State.RUNNING or await _answers(sandbox):
                return
            log.warning("agent link broke", sandbox=sandbox.id)
            instance = await self.runtime.adopt(sandbox.id)
            if instance is None:
                await self.kill(sandbox.id, DeathReason.CRASHED, "its agent does not answer")
            else:
                sandbox.instance = instance

    async def sweep(self, tenant: str, labels: Mapping[str, str]) -> Sequence[str]:
        """Kill every sandbox of this tenant that carries all of these labels; their ids."""
        doomed = [s.id for s in self.all(tenant) if labels.items() <= dict(s.metadata).items()]
        await self._kill_all(doomed, DeathReason.KILLED, "swept by label")
        return doomed

    async def drop_lease(self, lease: Lease) -> None:
        await self.leases.drop(lease, lambda ended: self._sweep_lease(ended, DeathReason.KILLED, "its lease was ended"))

    async def set_timeout(self, sandbox: Sandbox, seconds: float, *, only_extend: bool = False) -> None:
        """Let the sandbox live `seconds` from now; 0 or less: kill it now. The new end is recorded
        before this returns. Raises `BadRequest` for more than `sandbox.max_timeout`."""
        if seconds <= 0 and not only_extend:
            await self.kill(sandbox.id, DeathReason.TIMEOUT, "its timeout was set to now")
            return
        self._check_timeout(seconds)
        end_at = time.time() + seconds
        if only_extend and end_at <= sandbox.end_at:
            return
        sandbox.end_at = end_at
        self._arm(sandbox)
        await self.store.set_end(sandbox.id, end_at)

    def reserve(self, template: TemplateView, count: int) -> None:
        """Make up to `count` sandboxes ahead for a burst of creates that is coming."""
        self.pool.reserve(self.pool.shelf(template.build_id, template.rootfs, self.resources()), count)

    def capacity(self) -> dict[str, Any]:
        """How many sandboxes of the default size fit, and what is in the way where none does."""
        running, warm = len(self._sandboxes), self.pool.ready
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

    def straggle(self, sandbox_id: str) -> None:
        """Keep trying to destroy what no place was taken for."""
        self._stragglers.add(sandbox_id, lambda: None)

    def retry_after(self) -> float:
        """Seconds until a place may come free: the next expiry, but not more than 5, as kills come unannounced."""
        ends = min((s.end_at for s in self._sandboxes.values()), default=0.0)
        return min(max(ends - time.time(), 1.0), 5.0)

    async def _place(self, shelf: Shelf) -> Instance | None:
        """Take a place, from the pool if need be; a sandbox comes with it if one is ready by then.

        Raises `CapacityError`."""
        resources = shelf.key.resources
        while self.admission.shortage(resources) is not None:
            if await self.pool.evict():
                continue
            if not await self.pool.next_ready():
                break
            instance = self.pool.grab(shelf)
            if instance is not None:
                return instance
        self.admission.take(resources, self.retry_after())
        return None

    async def _make(self, template: TemplateView, resources: Resources) -> Instance:
        sandbox_id = new_id()
        self._creating += 1
        try:
            return await self.runtime.create(SandboxSpec(sandbox_id, template.rootfs, resources, sandbox_id))
        except BaseException:
            self.admission.release(resources)
            raise
        finally:
            self._creating -= 1

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
            metadata=dict(request.metadata),
            envs=dict(request.envs),
            defaults=Defaults.of(template.rootfs),
            secured=request.secured,
            lease_id=request.lease_id,
            idle_timeout=request.idle_timeout,
            extension=dict(request.extension),
        )

    async def _undo(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.id] = sandbox
        await self.kill(sandbox.id, DeathReason.HOST, "creation was not completed")

    def _check_timeout(self, seconds: float) -> None:
        longest = self.settings.sandbox.max_timeout
        if seconds > longest:
            raise BadRequest(f"timeout: {seconds:g} s is more than sandbox.max_timeout, {longest:g} s", field="timeout")

    def _check_lease(self, request: CreateRequest) -> None:
        try:
            self.leases.get(request.tenant, request.lease_id or "")
        except NotFound as error:
            raise BadRequest(str(error), field="metadata.sandyard.lease") from error

    def _keep(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.id] = sandbox
        self._watches[sandbox.id] = asyncio.create_task(self._watch(sandbox))
        self._arm(sandbox)
        if sandbox.idle_timeout is not None:
            self._arm_idle(sandbox, sandbox.idle_timeout)

    def _arm(self, sandbox: Sandbox) -> None:
        delay = sandbox.end_at - time.time()
        self.timers.set(f"end:{sandbox.id}", delay, lambda: self._expire(sandbox, "its lifetime ended"))

    def _arm_idle(self, sandbox: Sandbox, idle_timeout: float) -> None:
        def check() -> None:
            left = sandbox.last_used + idle_timeout - time.monotonic()
            if sandbox.streams or left > 0:
                self._arm_idle(sandbox, idle_timeout)
            else:
                self._expire(sandbox, f"idle for {idle_timeout:g} s")

        left = idle_timeout if sandbox.streams else sandbox.last_used + idle_timeout - time.monotonic()
        self.timers.set(f"idle:{sandbox.id}", left, check)

    def _expire(self, sandbox: Sandbox, detail: str) -> None:
        self._later(self.kill(sandbox.id, DeathReason.TIMEOUT, detail))

    def _lease_expired(self, lease: Lease) -> None:
        log.warning("lease expired", lease=lease.id, labels=dict(lease.labels))
        self._later(
            self.leases.drop(lease, lambda ended: self._sweep_lease(ended, DeathReason.LEASE, "its lease expired"))
        )

    async def _sweep_lease(self, lease: Lease, reason: DeathReason, detail: str) -> None:
        await self._kill_all([s.id for s in self.all() if s.lease_id == lease.id], reason, detail)

    async def _kill_all(self, ids: Sequence[str], reason: DeathReason, detail: str) -> None:
        await asyncio.gather(*(self._kill_quietly(i, reason, detail) for i in ids))

    async def _kill_quietly(self, sandbox_id: str, reason: DeathReason, detail: str) -> None:
        # What could not be destroyed is logged by _kill and left to the stragglers.
        with contextlib.suppress(SandyardError):
            await self.kill(sandbox_id, reason, detail)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", error=str(error))

    async def _watch(self, sandbox: Sandbox) -> None:
        death = await sandbox.instance.wait_dead()
        self._later(self.kill(sandbox.id, death.reason, death.detail))

    async def _kill(self, sandbox: Sandbox, death: SandboxDied) -> None:
        self.timers.cancel(f"end:{sandbox.id}")
        self.timers.cancel(f"idle:{sandbox.id}")
        for listener in self.on_death:
            listener(sandbox, death)
        try:
            async with self._kills_at_once, asyncio.timeout(DESTROY_SECONDS):
                await self.runtime.destroy(sandbox.id)
        except (SandyardError, TimeoutError) as error:
            log.error("sandbox could not be destroyed", sandbox=sandbox.id, error=str(error) or "timed out")
            self._stragglers.add(sandbox.id, lambda: self.admission.release(sandbox.resources))
            raise SandboxError(f"sandbox {sandbox.id} could not be destroyed: {error or 'timed out'}") from error
        else:
            self.admission.release(sandbox.resources)
        finally:
            sandbox.state = State.DEAD
            self.extension.stopped(sandbox)
            watch = self._watches.pop(sandbox.id, None)
            if watch is not None:
                watch.cancel()
            self._sandboxes.pop(sandbox.id, None)
            self._log_death(sandbox, death)
            await self._bury(DeathRecord(sandbox.id, sandbox.tenant, death.reason, death.detail, time.time()))

    def _log_death(self, sandbox: Sandbox, death: SandboxDied) -> None:
        wanted = death.reason in (DeathReason.KILLED, DeathReason.TIMEOUT)
        sandbox.log.append(str(death), Level.INFO if wanted else Level.ERROR, reason=death.reason.value)
        self.dead_logs.keep(sandbox.id, sandbox.tenant, sandbox.log)

    async def _bury(self, record: DeathRecord) -> None:
        try:
            await self.graveyard.bury(record)
        except HostError as error:
            # It is dead all the same, as was asked for; the next start finds that it does not live, and records it.
            log.error("a death could not be recorded", sandbox=record.id, error=str(error))
