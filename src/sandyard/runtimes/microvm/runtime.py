"""The microVM runtime: sandboxes with a kernel of their own, over QEMU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from sandyard.config import Settings
from sandyard.errors import CreateFailed, HostError, SandboxError, SandyardError
from sandyard.runtimes.base import Capabilities, Instance, Probe, Runtime, SandboxSpec
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import commits
from sandyard.runtimes.microvm.bringup import BringUp, identify
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import ID, Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.machine import Accel
from sandyard.runtimes.microvm.memory import suspended
from sandyard.runtimes.microvm.memory.keeping import Keeping
from sandyard.runtimes.microvm.probing import choose
from sandyard.runtimes.microvm.record import forget_halted, load_halted, save_halted
from sandyard.runtimes.microvm.stall import STALLED
from sandyard.runtimes.microvm.starting import split_layers

_PACE: dict[Accel, float] = {"kvm": 1.0, "tcg": 15.0}


class MicroVMRuntime(Runtime):
    """One per process and run directory. Needs root. `pace` is final once `probe` has returned."""

    name = "microvm"
    capabilities = Capabilities(
        memory_snapshot=True,
        pause_keeps_memory=True,
        file_snapshot=True,
        halt=True,
        network=True,
        hard_disk_limit=True,
        small_commits=False,  # of files alone; with memory they cost what changed
        shared_kernel=False,
    )

    def __init__(self, settings: Settings) -> None:
        self.host = Host(settings)
        self.starts_at_once = settings.sandbox.start_concurrency or (os.cpu_count() or 1)
        self._bring_up = BringUp(self)
        self._keeping = Keeping(self.host, self._bring_up)
        self._suspending = self._keeping.suspending
        self._slots = asyncio.Semaphore(self.starts_at_once)
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ready = asyncio.Lock()
        self._choice: Choice | None = None

    async def probe(self) -> Probe:
        try:
            choice = await self.choose()
        except SandyardError as error:
            return Probe(False, error.message, error.remedy)
        engine = f"QEMU {choice.engine.version}, kernel {choice.assets.version}"
        detail = f"accelerator {choice.accel}, {engine}, an empty guest boots in {choice.boot_seconds:.1f} s"
        slow = "KVM does not boot a guest on this host: guests run in software" if choice.accel == "tcg" else None
        return Probe(True, detail, slow)

    async def choose(self) -> Choice:
        """The accelerator, chosen once by booting a guest with it. Raises `HostError`."""
        async with self._ready:
            if self._choice is None:
                self._choice = await choose(self.host, self._bring_up)
                self.pace = _PACE[self._choice.accel]
            return self._choice

    async def create(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        if not ID.fullmatch(sandbox_id):
            raise CreateFailed("spec", f"sandbox id {sandbox_id!r} is not 1 to 40 of a-z and 0-9")
        split_layers(spec.rootfs.layers)
        choice = await self._chosen()
        async with self._slots, self._lock(sandbox_id):
            if await ended(self.host.known, sandbox_id):
                raise CreateFailed("spec", f"sandbox {sandbox_id} exists already")
            try:
                return await self._keeping.create(choice, spec)
            except BaseException:
                await finish(self.host.remove(sandbox_id))
                raise

    async def list(self) -> Sequence[str]:
        return await asyncio.to_thread(lambda: sorted(self.host.ids()))

    async def adopt(self, sandbox_id: str) -> Instance | None:
        async with self._lock(sandbox_id):
            known = self.host.instances.get(sandbox_id)
            try:
                choice = await self.choose()
                if known is None:
                    return await self._bring_up.find(choice, sandbox_id)
                if not known.paused and not known.stall.lasts:
                    await self._bring_up.relink(known, choice)
                return known
            except (SandboxError, HostError):
                return None  # it does not live, or does not answer: for `destroy`

    async def pause(self, instance: MicroVMInstance) -> None:
        """`Instance.pause`: with its disk held still and whole, so that it can be committed as it stands."""
        async with self._lock(instance.spec.sandbox_id):
            if instance.paused:
                return
            try:
                await instance.stand_still()
            except BaseException:
                with suppress(SandyardError):  # what it failed with says more
                    await finish(instance.go_on())
                raise
            instance.paused = True

    async def resume(self, instance: MicroVMInstance) -> None:
        """`Instance.resume`, with the clock set to the host's."""
        async with self._lock(instance.spec.sandbox_id):
            if not instance.paused:
                return
            await instance.control.execute("cont")
            instance.paused = False
            if instance.linked:
                instance.agent.go_on()
            else:
                await self._bring_up.relink(instance, await self.choose())
            await identify(instance, b"")
            await instance.agent.freeze(False)

    async def try_again(self, instance: MicroVMInstance) -> bool:
        """Of a guest that the host's full disk stopped: let it try again to write; whether it stood still. Raises
        `SandboxError`, `GuestError`."""
        async with self._lock(instance.spec.sandbox_id):
            if instance.paused:
                return False
            status = await instance.control.execute("query-status")
            if status.get("status") == STALLED:
                await instance.control.execute("cont")
                return True
            if not instance.linked or instance.agent.closed:
                await self._bring_up.relink(instance, await self.choose())
                await instance.agent.freeze(False)
            return False

    async def commit(
        self, instance: MicroVMInstance, target: Path, *, durable: bool, parent: Path | None, memory: bool
    ) -> int:
        """`Instance.commit`."""
        async with self._lock(instance.spec.sandbox_id):
            if memory:
                return await self._keeping.commit(instance, target, parent, durable=durable)
            return await commits.commit(self.host, instance, target, durable=durable)

    async def halt(self, sandbox_id: str) -> None:
        async with self._lock(sandbox_id):
            if load_halted(self.host.layout.disk(sandbox_id)) is not None:
                await finish(self._halt(None, sandbox_id))
                return
            if (record := self._suspending.get(sandbox_id)) is not None:
                await finish(self._halt(record.spec, sandbox_id))
                return
            instance = self.host.instances.get(sandbox_id)
            if instance is None:
                raise SandboxError(f"sandbox {sandbox_id} cannot be halted: it does not live")
            if not instance.paused:
                await instance.agent.freeze(True)
            await finish(self._halt(instance.spec, sandbox_id))

    async def _halt(self, spec: SandboxSpec | None, sandbox_id: str) -> None:
        if spec is not None:
            await asyncio.to_thread(Disks(self.host.layout, spec).sync)  # a fork leaves what it copied unsynced
            await asyncio.to_thread(save_halted, self.host.layout.disk(sandbox_id), spec)
        await self.host.end(sandbox_id)
        await self._suspending.forget(sandbox_id)

    async def halted(self) -> Sequence[str]:
        disks = self.host.layout.disks

        def find() -> list[str]:
            entries = os.listdir(disks) if disks.is_dir() else []
            return sorted(name for name in entries if ID.fullmatch(name) and load_halted(disks / name) is not None)

        return await asyncio.to_thread(find)

    async def boot(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        split_layers(spec.rootfs.layers)
        choice = await self._chosen()
        async with self._slots, self._lock(sandbox_id):
            own = self.host.layout.disk(sandbox_id)
            if load_halted(own) is None:
                raise CreateFailed("disk", f"sandbox {sandbox_id} is not halted")
            await finish(self.host.end(sandbox_id))
            try:
                instance = await self._bring_up.start(choice, spec, used=True)
                await asyncio.to_thread(forget_halted, own)
                return instance
            except BaseException:
                await finish(self._halt(spec, sandbox_id))
                raise

    async def suspend(self, sandbox_id: str) -> None:
        async with self._lock(sandbox_id):
            if self._suspending.get(sandbox_id) is not None:
                await finish(self.host.end(sandbox_id))
                return
            instance = self.host.instances.get(sandbox_id)
            if instance is None:
                raise SandboxError(f"sandbox {sandbox_id} cannot be suspended: it does not live")
            await self._suspending.suspend(instance)

    async def suspended(self) -> Sequence[str]:
        return await asyncio.to_thread(suspended.ids, self.host.layout)

    async def wake(self, spec: SandboxSpec) -> Instance:
        choice = await self._chosen()
        async with self._slots, self._lock(spec.sandbox_id):
            return await self._suspending.wake(choice, spec)

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        async with self._lock(sandbox_id):
            record = self._suspending.get(sandbox_id)
            if memory:
                if record is None:
                    raise SandboxError(f"sandbox {sandbox_id} is not suspended: it has no memory")
                return await self._suspending.commit(record, target)
            if record is not None:
                return await commits.commit_halted(self.host, record.spec, target, record.disk)
            spec = load_halted(self.host.layout.disk(sandbox_id))
            if spec is None:
                raise SandboxError(f"sandbox {sandbox_id} is not halted")
            return await commits.commit_halted(self.host, spec, target)

    async def destroy(self, sandbox_id: str) -> None:
        if not ID.fullmatch(sandbox_id):
            return  # nothing of ours has such a name
        instance = self.host.instances.get(sandbox_id)
        if instance is not None:
            instance.kill()  # whoever has the lock may wait for a guest that does not answer
        async with self._lock(sandbox_id):
            await finish(self.host.remove(sandbox_id))

    async def close(self) -> None:
        await self.host.close()

    async def _chosen(self) -> Choice:
        try:
            return await self.choose()
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._busy.setdefault(sandbox_id, asyncio.Lock())
