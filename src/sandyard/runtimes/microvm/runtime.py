"""The microVM runtime: sandboxes with a kernel of their own, over QEMU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import CreateFailed, HostError, SandboxError, SandyardError
from sandyard.runtimes.base import Capabilities, HostMemory, Instance, Probe, Runtime, SandboxSpec
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import commits, shortening
from sandyard.runtimes.microvm.bringup import BringUp, identify
from sandyard.runtimes.microvm.choice import KVM, Choice, traces
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import ID, Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.machine import Accel
from sandyard.runtimes.microvm.memory import suspended
from sandyard.runtimes.microvm.memory.holding import held_bytes
from sandyard.runtimes.microvm.memory.keeping import Keeping
from sandyard.runtimes.microvm.probing import choose
from sandyard.runtimes.microvm.record import forget_halted, load_halted, save_halted
from sandyard.runtimes.microvm.stall import STALLED
from sandyard.runtimes.microvm.starting import split_layers

_SLOW = 3.0  # seconds of a start on bare hardware
_CLOSE_PATIENCE = 45.0  # seconds; whoever stops a server kills it some time
_PACE: dict[Accel, float] = {"kvm": 1.0, "tcg": 15.0}


class MicroVMRuntime(Runtime):
    """One per process and run directory. Needs root. `pace` is final once `probe` has returned."""

    name = "microvm"
    start_mb = 96  # of QEMU, in software half of it translated code, and of the guest's pages
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
        self.above_mb = settings.microvm.guest_mb + settings.microvm.overhead_mb
        self._bring_up = BringUp(self)
        self._keeping = Keeping(self.host, self._bring_up)
        self._suspending = self._keeping.suspending
        self._slots = asyncio.Semaphore(self.starts_at_once)
        self._ready = asyncio.Lock()
        self._choice: Choice | None = None
        self._traces: Sequence[object] = ()

    def host_memory(self) -> HostMemory:
        return HostMemory(*self.host.cgroups.taken())

    def ready_bytes(self) -> int:
        return self.host.spares.taken_bytes()

    async def probe(self) -> Probe:
        try:
            return self._told(await self.choose())
        except SandyardError as error:
            return Probe(False, error.message, error.remedy)

    async def check(self) -> str:
        found = self._told(await self.choose())
        return f"{found.detail} ({found.remedy})" if found.remedy else found.detail

    def _told(self, choice: Choice) -> Probe:
        engine = f"QEMU {choice.engine.version}, kernel {choice.assets.version}"
        detail = f"accelerator {choice.accel}, {engine}, an empty guest boots in {choice.boot_seconds:.1f} s"
        if choice.accel == "kvm":
            return Probe(True, detail)
        why = "KVM boots no guest on this host" if KVM.exists() else f"this host has no {KVM}"
        if self.host.settings.microvm.accel == "tcg":
            why = "microvm.accel is tcg"
        return Probe(True, detail, f"{why}: guests run in software, ten times slower or more")

    async def choose(self) -> Choice:
        """The accelerator, chosen by booting a guest with it, and what is on this host to start guests with: looked
        at again where that was exchanged. Raises `HostError`."""
        async with self._ready:
            now = traces(self.host.settings)
            if self._choice is None or now != self._traces:
                self._choice = await choose(self.host, self._bring_up, self._choice)
                self._traces, self.pace = now, _PACE[self._choice.accel]
            return self._choice

    def outdate(self) -> None:
        """A VMM turned out to be another QEMU than the one chosen, whatever the program's file looks like."""
        self._traces = ()

    async def create(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        if not ID.fullmatch(sandbox_id):
            raise CreateFailed("spec", f"sandbox id {sandbox_id!r} is not 1 to 40 of a-z and 0-9")
        if spec.memory is None:
            split_layers(spec.rootfs.layers)
        choice = await self._chosen()
        async with self._slot(), self.host.turns.of(sandbox_id):
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
        async with self.host.turns.of(sandbox_id):
            known = self.host.instances.get(sandbox_id)
            try:
                choice = await self._known()
                if known is None:
                    return await self._bring_up.find(choice, sandbox_id)
                if not known.paused and not known.stall.lasts:
                    await known.unless_stalled(self._bring_up.relink(known, choice))
                return known
            except (SandboxError, HostError):
                if known is not None and known.stall.lasts:
                    return known  # it cannot answer before that is over
                return None  # it does not live, or does not answer: for `destroy`

    async def pause(self, instance: MicroVMInstance) -> None:
        """`Instance.pause`: with its disk held still and whole, so that it can be committed as it stands."""
        async with self.host.turns.of(instance.spec.sandbox_id):
            if instance.paused:
                return
            try:
                if instance.spec.sandbox_id in self.host.background:  # that is not to end as the guest is stopped
                    await shortening.call_off(self.host, instance)
                await instance.stand_still()
            except BaseException:
                with suppress(SandyardError):  # what it failed with says more
                    await finish(instance.go_on())
                raise
            instance.paused = True

    async def resume(self, instance: MicroVMInstance) -> None:
        """`Instance.resume`, with the clock set to the host's."""
        async with self.host.turns.of(instance.spec.sandbox_id):
            if not instance.paused:
                return
            try:
                await self._resume(instance)
            except BaseException:
                await finish(instance.stop_again())
                raise

    async def _resume(self, instance: MicroVMInstance) -> None:
        await instance.control.execute("cont")
        instance.paused = False
        if instance.linked:
            instance.agent.go_on()
        else:
            await instance.unless_stalled(self._bring_up.relink(instance, await self._known()))
        await instance.unless_stalled(identify(instance, b""))
        instance.frozen = True  # also where an earlier server froze it
        await instance.thaw()

    async def try_again(self, instance: MicroVMInstance) -> bool:
        """Of a guest that is to run: let it go on where it stands still, and all in it; whether it stood still. Raises
        `SandboxError`, `GuestError`."""
        async with self.host.turns.of(instance.spec.sandbox_id):
            if instance.paused:
                return False
            if await instance.status() in (STALLED, "paused"):
                await instance.control.execute("cont")
                return True
            instance.stall.full.clear()
            if not instance.linked or instance.agent.closed:
                await self._bring_up.relink(instance, await self._known())
                instance.frozen = True  # its link may have broken in the middle of that
            await instance.thaw()
            return False

    async def commit(
        self, instance: MicroVMInstance, target: Path, *, durable: bool, parent: Path | None, memory: bool
    ) -> int:
        """`Instance.commit`."""
        async with self.host.turns.of(instance.spec.sandbox_id):
            await instance.check_room()
            if memory:
                return await self._keeping.commit(instance, target, durable=durable)
            return await commits.commit(self.host, instance, target, durable=durable)

    async def halt(self, sandbox_id: str) -> None:
        async with self.host.turns.of(sandbox_id):
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
                await instance.check_room()
                with suppress(SandboxError):  # else a VMM that is killed in its last moment leaves half of an image
                    await shortening.call_off(self.host, instance)
                await instance.unless_stalled(instance.agent.freeze(True))
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
        async with self._slot(), self.host.turns.of(sandbox_id):
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
        async with self.host.turns.of(sandbox_id):
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
        async with self._slot(), self.host.turns.of(spec.sandbox_id):
            return await self._suspending.wake(choice, spec)

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        async with self.host.turns.of(sandbox_id):
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

    def held_bytes(self, layers: Collection[Path], others: Collection[Path]) -> int:
        return held_bytes(self.host.layout, layers, others)

    async def destroy(self, sandbox_id: str) -> None:
        if not ID.fullmatch(sandbox_id):
            return  # nothing of ours has such a name
        instance = self.host.instances.get(sandbox_id)
        if instance is not None:
            instance.kill()  # whoever has the lock may wait for a guest that does not answer
        async with self.host.turns.of(sandbox_id):
            await finish(self._keeping.remove(sandbox_id))

    async def rest(self) -> None:
        await self.host.spares.let_go()

    async def close(self) -> None:
        """What is under way is brought to its end or undone; the guests go on."""
        await self.host.turns.end(_CLOSE_PATIENCE)
        await self._keeping.close()
        await self.host.close()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """A place among the starts that make progress at a time. One that takes long waits for its guest, which may be
        hostile and keep silent, and gives its place to others meanwhile."""
        await self._slots.acquire()
        with ExitStack() as place:
            place.callback(self._slots.release)
            timer = asyncio.get_running_loop().call_later(_SLOW * self.pace, place.close)
            try:
                yield
            finally:
                timer.cancel()

    async def _known(self) -> Choice:
        """For a guest that is there: it runs on whatever becomes of QEMU and its assets on the disk."""
        return self._choice or await self.choose()

    async def _chosen(self) -> Choice:
        try:
            return await self.choose()
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error
