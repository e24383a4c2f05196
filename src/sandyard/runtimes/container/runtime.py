"""The container runtime: sandboxes that share the host's kernel, over an OCI engine."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sandyard.config import Settings
from sandyard.errors import AgentLinkError, CreateFailed, HostError, SandboxError, SandyardError, Unsupported
from sandyard.guest import agent_binary
from sandyard.guest.base import Agent
from sandyard.guest.client import open_agent
from sandyard.runtimes.base import MAX_LAYERS, Capabilities, HostMemory, Instance, Probe, Runtime, SandboxSpec
from sandyard.runtimes.container.cgroups import Cgroups, detect_cgroups
from sandyard.runtimes.container.choice import Choice, Chooser
from sandyard.runtimes.container.commit import commit, sync_layers
from sandyard.runtimes.container.derived import exists, forget, parent_of, ready
from sandyard.runtimes.container.disk import Disks
from sandyard.runtimes.container.halts import Halts
from sandyard.runtimes.container.instance import ContainerInstance
from sandyard.runtimes.container.launch import Start, launcher_binary, start, stop_making
from sandyard.runtimes.container.layout import (
    Layout,
    engine_pid,
    install_agent,
    load_record,
    new_boot_id,
    remove_tree,
    save_record,
    write_json,
)
from sandyard.runtimes.container.merging import merge
from sandyard.runtimes.container.oci import configuration
from sandyard.runtimes.container.shared import raise_host_limits
from sandyard.runtimes.finishing import finish

AGENT_TIMEOUT = 10.0
DESTROY_TIMEOUT = 10.0
HALT_TIMEOUT = 30.0  # its dirty pages go to the host's disk
FREEZE_TIMEOUT = 5.0
_STARTS_PER_CORE = 4  # most of a start is waiting for the kernel
_ID = re.compile(r"[a-z0-9]{1,40}")
_Result = TypeVar("_Result")


class ContainerRuntime(Runtime):
    """One per process and run directory. Needs root.

    `capabilities` are final once `probe` or the first `create` has returned: whether the disk limit
    is hard is found out by trial.
    """

    name = "container"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = Layout(settings.paths.run.absolute(), settings.paths.state.absolute())
        self.capabilities = Capabilities(
            pause_keeps_memory=True,
            file_snapshot=True,
            halt=True,
            network=True,
            hard_disk_limit=settings.container.disk != "none",
        )
        self.halts = Halts(self.layout.disks)
        self.disks = Disks(self.layout.disks, self.layout.blanks, settings.container.uid_base)
        self.starts_at_once = settings.sandbox.start_concurrency or _STARTS_PER_CORE * (os.cpu_count() or 1)
        self._slots = asyncio.Semaphore(self.starts_at_once)
        self._threads = ThreadPoolExecutor(self.starts_at_once + 2, thread_name_prefix="sandyard-container")
        self._instances: dict[str, ContainerInstance] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ready = asyncio.Lock()
        self._choice: Choice | None = None
        self._cgroups: Cgroups | None = None

    @property
    def cgroups(self) -> Cgroups:
        if self._cgroups is None:
            self._cgroups = detect_cgroups(self.layout.cgroup_parent)
        return self._cgroups

    def host_memory(self) -> HostMemory:
        return HostMemory(*self.cgroups.taken())

    async def probe(self) -> Probe:
        try:
            choice = await self.choose()
            try:
                await Chooser(self).try_out(choice)
            except CreateFailed:
                choice = await self.choose(again=True)  # the host changed since
        except SandyardError as error:
            return Probe(False, error.message, error.remedy)
        limit = "hard limit" if choice.disk == "loop" else "no limit"
        detail = f"{choice.engine.name} {choice.engine.version}, cgroup v{self.cgroups.version}, disk: {limit}"
        return Probe(True, detail)

    async def choose(self, *, again: bool = False) -> Choice:
        """The engine and the kind of disk, chosen once by starting a sandbox. Raises `HostError`.

        `again` tries anew, whatever was found before.
        """
        async with self._ready:
            if self._choice is None or again:
                if os.geteuid() != 0:
                    raise HostError("the container runtime needs root", remedy="run as root (sudo sandyard …)")
                self.layout.prepare()
                await self.in_thread(self.cgroups.prepare)
                await self.in_thread(raise_host_limits)
                self._choice = await Chooser(self).choose(again=again)
                self.capabilities = replace(
                    self.capabilities,
                    pause_keeps_memory=self.cgroups.freezer,
                    hard_disk_limit=self._choice.disk == "loop",
                )
            return self._choice

    async def create(self, spec: SandboxSpec) -> Instance:
        try:
            return await self.create_with(await self.choose(), spec)
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error

    async def create_with(self, choice: Choice, spec: SandboxSpec) -> ContainerInstance:
        """`create`, with a given engine and disk."""
        sandbox_id = spec.sandbox_id
        if not _ID.fullmatch(sandbox_id):
            raise CreateFailed("spec", f"sandbox id {sandbox_id!r} is not 1 to 40 of a-z and 0-9")
        _check_layers(spec)
        async with self._slots, self._lock(sandbox_id):
            if sandbox_id in self._instances or self.layout.home(sandbox_id).exists():
                raise CreateFailed("spec", f"sandbox {sandbox_id} exists already")
            try:
                await self.in_thread(self._start, choice, spec, False)
                instance = await self._connect(spec)
            except BaseException as error:
                await finish(self._remove(sandbox_id))
                if isinstance(error, OSError) and not isinstance(error, SandyardError):
                    raise CreateFailed("files", str(error)) from error
                raise
            self._instances[sandbox_id] = instance
            return instance

    async def list(self) -> Sequence[str]:
        return await self.in_thread(lambda: sorted(self._ids()))

    async def adopt(self, sandbox_id: str) -> Instance | None:
        """Also gives a sandbox of this process a new link, in place of one that broke. A paused one gets its
        link when it is resumed."""
        async with self._lock(sandbox_id):
            known = self._instances.get(sandbox_id)
            spec = known.spec if known else load_record(self.layout.home(sandbox_id))
            if spec is None or self.halts.get(sandbox_id) is not None:
                return None
            try:
                if known:
                    if not known.paused:
                        await self._answer(known)
                    return known
                if await self.in_thread(self.cgroups.frozen, sandbox_id):
                    instance = self._hold(spec)
                    instance.paused = True
                else:
                    instance = await self._connect(spec)
            except SandboxError:
                return None  # it does not live, or its agent does not answer: for `destroy`
            self._instances[sandbox_id] = instance
            return instance

    async def pause(self, instance: ContainerInstance) -> None:
        """`Instance.pause`."""
        if not self.cgroups.freezer:
            raise Unsupported("this host mounts no freezer control group: a sandbox cannot be paused with its memory")
        async with self._lock(instance.spec.sandbox_id):
            if not instance.paused:
                await self.in_thread(self.cgroups.freeze, instance.spec.sandbox_id, FREEZE_TIMEOUT)
                instance.paused = True

    async def resume(self, instance: ContainerInstance) -> None:
        """`Instance.resume`."""
        async with self._lock(instance.spec.sandbox_id):
            await self.in_thread(self.cgroups.thaw, instance.spec.sandbox_id)
            instance.paused = False
            if not instance.linked:
                await self._answer(instance)

    async def commit(self, instance: ContainerInstance, target: Path, *, durable: bool, parent: Path | None) -> int:
        """`Instance.commit`."""
        spec = instance.spec
        if len(spec.rootfs.layers) >= MAX_LAYERS:
            raise Unsupported(f"sandbox {spec.sandbox_id} stands on {MAX_LAYERS} layers already; no more can be added")
        async with self._lock(spec.sandbox_id):

            @contextmanager
            def stand_still() -> Iterator[None]:
                if not instance.paused:
                    self.cgroups.freeze(spec.sandbox_id, FREEZE_TIMEOUT)
                try:
                    yield
                finally:
                    if not instance.paused:
                        self.cgroups.thaw(spec.sandbox_id)

            if durable:  # it is nothing without what it stands on
                await self.in_thread(sync_layers, spec.rootfs.layers)
            home = self.layout.disks / spec.sandbox_id
            return await self.in_thread(commit, home, target, stand_still, durable, parent)

    async def halt(self, sandbox_id: str) -> None:
        async with self._lock(sandbox_id):
            halt = self.halts.get(sandbox_id)
            if halt is not None and halt.complete:
                return
            known = self._instances.get(sandbox_id)
            spec = known.spec if known else halt.spec if halt else load_record(self.layout.home(sandbox_id))
            if spec is None:
                raise SandboxError(f"sandbox {sandbox_id} cannot be halted: it does not live")
            await finish(self._halt(spec))

    async def halted(self) -> Sequence[str]:
        return await self.in_thread(self.halts.ids)

    async def boot(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        _check_layers(spec)
        try:
            choice = await self.choose()
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error
        async with self._slots, self._lock(sandbox_id):
            halt = self.halts.get(sandbox_id)
            if halt is None:
                raise CreateFailed("disk", f"sandbox {sandbox_id} is not halted")
            if not halt.complete:
                await finish(self._halt(halt.spec))
            await self.in_thread(self.halts.begin, spec)  # from here on its disk is not whole
            try:
                await self.in_thread(self._start, replace(choice, disk=self.disks.kind(sandbox_id)), spec, True)
                instance = await self._connect(spec)
                await self.in_thread(self.halts.forget, sandbox_id)
            except BaseException as error:
                await finish(self._halt(spec))
                if isinstance(error, OSError) and not isinstance(error, SandyardError):
                    raise CreateFailed("files", str(error)) from error
                raise
            self._instances[sandbox_id] = instance
            return instance

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        if memory:
            raise Unsupported("a halted container has no memory")
        async with self._lock(sandbox_id):
            halt = self.halts.get(sandbox_id)
            if halt is None or not halt.complete:
                raise SandboxError(f"sandbox {sandbox_id} is not halted")
            if len(halt.spec.rootfs.layers) >= MAX_LAYERS:
                raise Unsupported(f"sandbox {sandbox_id} stands on {MAX_LAYERS} layers already; no more can be added")
            return await self.in_thread(commit, self.layout.disks / sandbox_id, target, None, True, parent)

    def needs(self, layer: Path) -> Path | None:
        return parent_of(layer)

    def slim(self, layer: Path) -> bool:
        return forget(layer)

    def merge(self, layer: Path, spare: Collection[Path]) -> bool:
        return merge(layer, spare)

    async def destroy(self, sandbox_id: str) -> None:
        if not _ID.fullmatch(sandbox_id):
            return  # nothing of ours has such a name
        async with self._lock(sandbox_id):
            await finish(self._remove(sandbox_id))

    async def close(self) -> None:
        for instance in self._instances.values():
            await instance.release()
        self._instances.clear()
        if self._cgroups is not None:
            self._cgroups.remove_parent()
        self._threads.shutdown(wait=False)

    async def in_thread(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a blocking call to its end, also when cancelled: it holds things that are released after it."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)
        return await finish(work)

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._busy.setdefault(sandbox_id, asyncio.Lock())

    def _ids(self) -> set[str]:
        found = self.disks.ids() | self.cgroups.ids()
        for parent in (self.layout.sandboxes, self.layout.engine):
            if parent.is_dir():
                found.update(entry.name for entry in os.scandir(parent))
        return {name for name in found if _ID.fullmatch(name)}

    def _start(self, choice: Choice, spec: SandboxSpec, used: bool) -> None:
        """`used`: on the disk it had before."""
        try:
            ready(spec.rootfs.layers)
        except SandboxError as error:
            raise CreateFailed("rootfs", error.message, remedy=error.remedy) from error
        home = self.layout.home(spec.sandbox_id)
        uid_base = self.settings.container.uid_base
        home.mkdir(mode=0o700)
        save_record(home, spec)
        clone = [] if used else self.disks.prepare(choice.disk, spec.sandbox_id, spec.resources.disk_mb)
        mounts = self.layout.mounts()
        config = configuration(
            spec,
            rootfs=mounts / "rootfs",
            agent=install_agent(agent_binary(), mounts),
            launcher=launcher_binary(),
            boot_id=new_boot_id(home),
            cgroup=self.cgroups.engine_path(spec.sandbox_id),
            uid_base=uid_base,
            swap_limit=self.cgroups.swap_limit,
        )
        write_json(home / "config.json", config)
        plan = Start(
            engine=choice.engine,
            engine_root=self.layout.engine,
            unmount=self.cgroups.unmount,
            mounts=mounts,
            home=home,
            disk_home=self.layout.disks / spec.sandbox_id,
            disk=choice.disk,
            clone=clone,
            used=used,
            spec=spec,
            uid_base=uid_base,
        )
        start(plan, self.layout.socket(spec.sandbox_id))

    async def _link(self, sandbox_id: str) -> Agent:
        return await open_agent(self.layout.socket(sandbox_id), AGENT_TIMEOUT)

    async def _connect(self, spec: SandboxSpec) -> ContainerInstance:
        """Hold PID 1, then ask its agent. Raises `CreateFailed` where either is not there."""
        instance = self._hold(spec)
        try:
            await self._answer(instance)
        except BaseException:
            await instance.release()
            raise
        return instance

    async def _answer(self, instance: ContainerInstance) -> None:
        """Give the instance a link whose agent answered, unless it dies first."""
        link = asyncio.ensure_future(self._link(instance.spec.sandbox_id))
        death = asyncio.ensure_future(instance.wait_dead())
        try:
            await asyncio.wait((link, death), return_when=asyncio.FIRST_COMPLETED)
            if not link.done():
                raise CreateFailed("agent", f"{death.result().reason}: {death.result().detail}")
            await instance.replace_agent(link.result())
        except AgentLinkError as error:
            raise CreateFailed("agent", error.message) from error
        except asyncio.CancelledError:
            if link.done() and link.exception() is None:
                await link.result().close()  # it came while we were called off
            raise
        finally:
            link.cancel()
            death.cancel()

    def _hold(self, spec: SandboxSpec) -> ContainerInstance:
        pid = engine_pid(self.layout.home(spec.sandbox_id))
        if pid is None:
            raise CreateFailed("engine", f"no process of sandbox {spec.sandbox_id}")
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise CreateFailed("agent", f"PID 1 is gone: {error}") from error
        # Only now, with the process held: its number cannot be reused under this check.
        if not self.cgroups.holds(spec.sandbox_id, pid):
            os.close(pidfd)
            raise CreateFailed("agent", f"process {pid} is not of sandbox {spec.sandbox_id}")
        return ContainerInstance(spec, pid, pidfd, self)

    async def _remove(self, sandbox_id: str) -> None:
        deadline = time.monotonic() + DESTROY_TIMEOUT
        await self._end(sandbox_id, deadline)
        await self.in_thread(self._purge, sandbox_id, deadline)
        self._instances.pop(sandbox_id, None)

    async def _halt(self, spec: SandboxSpec) -> None:
        """End the processes and keep the disk; the record says from the start where this leads."""
        sandbox_id, deadline = spec.sandbox_id, time.monotonic() + HALT_TIMEOUT
        await self.in_thread(self.halts.begin, spec)
        await self._end(sandbox_id, deadline)
        await self.in_thread(self._clear, sandbox_id, deadline)
        await self.in_thread(self.halts.complete, spec, deadline)
        self._instances.pop(sandbox_id, None)

    async def _end(self, sandbox_id: str, deadline: float) -> None:
        """Kill PID 1, or whoever still makes it, and let go of it."""
        instance = self._instances.get(sandbox_id)
        if instance is None:
            await self.in_thread(stop_making, self.layout.home(sandbox_id), deadline)
            return
        instance.kill()
        if instance.paused:  # it dies when it is thawed, with all its processes told to die before
            await self.in_thread(self.cgroups.kill, sandbox_id, deadline)
        with suppress(TimeoutError):  # `_clear` kills harder, and says what stays
            await asyncio.wait_for(instance.wait_dead(), DESTROY_TIMEOUT / 2)
        await instance.release()

    def _clear(self, sandbox_id: str, deadline: float) -> None:
        """Remove all but the disk from the host, whatever step it stopped at. Blocking; the record goes last."""
        self.cgroups.kill(sandbox_id, deadline)
        self.cgroups.remove(sandbox_id, deadline)
        try:
            remove_tree(self.layout.engine / sandbox_id)
            remove_tree(self.layout.home(sandbox_id))
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: files do not go: {error}") from error

    def _purge(self, sandbox_id: str, deadline: float) -> None:
        """Remove what is on the host, whatever step it stopped at. Blocking; the record goes last."""
        home = self.layout.home(sandbox_id)
        self.cgroups.kill(sandbox_id, deadline)
        self.cgroups.remove(sandbox_id, deadline)
        try:
            remove_tree(self.layout.engine / sandbox_id)
            self.halts.forget(sandbox_id)  # before its disk: half of one is not to be booted
            self.disks.remove(sandbox_id)
            remove_tree(home)
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: files do not go: {error}") from error


def _check_layers(spec: SandboxSpec) -> None:
    """Raises `CreateFailed`."""
    if len(spec.rootfs.layers) > MAX_LAYERS:
        raise CreateFailed("rootfs", f"{len(spec.rootfs.layers)} layers, where {MAX_LAYERS} are the most")
    for layer in spec.rootfs.layers:
        if not exists(layer):
            raise CreateFailed("rootfs", f"layer {layer} is neither a directory nor an image")
