"""The microVM runtime: sandboxes with a kernel of their own, over QEMU."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from sandyard.config import Settings
from sandyard.errors import AgentLinkError, CreateFailed, HostError, SandboxError, SandyardError, Unsupported
from sandyard.guest.client import LinkAgent, open_agent
from sandyard.runtimes.base import Capabilities, Instance, Probe, Runtime, SandboxSpec
from sandyard.runtimes.container.cgroups import Cgroups, detect_cgroups
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.container.runtime import finish
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.assets import ready_assets
from sandyard.runtimes.microvm.choice import Choice, candidates, find_engine, remember, remembered
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN, last_lines, run_confined
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Accel
from sandyard.runtimes.microvm.record import forget_halted, load_halted, load_running, save_halted
from sandyard.runtimes.microvm.starting import LAYER_FILES_MAX, Starter, split_layers

_ID = re.compile(r"[a-z0-9]{1,40}")
_BOOT_TIMEOUT: dict[Accel, float] = {"kvm": 20.0, "tcg": 180.0}
_CALL_TIMEOUT: dict[Accel, float] = {"kvm": 30.0, "tcg": 120.0}
_PACE: dict[Accel, float] = {"kvm": 1.0, "tcg": 15.0}
_CONTROL_TIMEOUT = 30.0
_GREETING = 5.0
_DESTROY_TIMEOUT = 20.0
_COMMIT_TIMEOUT = 600.0
_Result = TypeVar("_Result")


class MicroVMRuntime(Runtime):
    """One per process and run directory. Needs root. `pace` is final once `probe` has returned."""

    name = "microvm"
    capabilities = Capabilities(
        pause_keeps_memory=True,
        file_snapshot=True,
        halt=True,
        hard_disk_limit=True,
        small_commits=False,
        shared_kernel=False,
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.layout = Layout.of(settings)
        self.starts_at_once = settings.sandbox.start_concurrency or (os.cpu_count() or 1)
        self._slots = asyncio.Semaphore(self.starts_at_once)
        self._instances: dict[str, MicroVMInstance] = {}
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ready = asyncio.Lock()
        self._choice: Choice | None = None
        self._cgroups: Cgroups | None = None

    @property
    def cgroups(self) -> Cgroups:
        if self._cgroups is None:
            self._cgroups = detect_cgroups(self.layout.cgroup_parent)
        return self._cgroups

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
                if os.geteuid() != 0:
                    raise HostError("the microVM runtime needs root", remedy="run as root (sudo sandyard …)")
                self.layout.prepare()
                await asyncio.to_thread(self.cgroups.prepare)
                self._choice = await self._try_out()
                self.pace = _PACE[self._choice.accel]
            return self._choice

    async def create(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        if not _ID.fullmatch(sandbox_id):
            raise CreateFailed("spec", f"sandbox id {sandbox_id!r} is not 1 to 40 of a-z and 0-9")
        if spec.network is not None:
            raise CreateFailed("network", "the microVM runtime gives sandboxes no network yet")
        split_layers(spec.rootfs.layers)
        choice = await self._chosen()
        async with self._slots, self._lock(sandbox_id):
            if await self._in_thread(self._known, sandbox_id):
                raise CreateFailed("spec", f"sandbox {sandbox_id} exists already")
            try:
                return await self._bring_up(choice, spec, used=False)
            except BaseException:
                await finish(self._remove(sandbox_id))
                raise

    async def list(self) -> Sequence[str]:
        return await asyncio.to_thread(lambda: sorted(self._ids()))

    async def adopt(self, sandbox_id: str) -> Instance | None:
        async with self._lock(sandbox_id):
            known = self._instances.get(sandbox_id)
            try:
                choice = await self.choose()
                if known is not None:
                    if not known.paused:
                        await self._answer(known, choice, _CALL_TIMEOUT[choice.accel])
                    return known
                record = load_running(self.layout.home(sandbox_id))
                if record is None or load_halted(self.layout.disk(sandbox_id)) is not None:
                    return None
                instance = self._hold(record.spec, record.pid)
                try:
                    state = await instance.open_control(self.layout.qmp_socket(sandbox_id), _CONTROL_TIMEOUT)
                    instance.paused = state == "paused"
                    if not instance.paused:
                        await self._answer(instance, choice, _CALL_TIMEOUT[choice.accel])
                except BaseException:
                    await instance.release()
                    raise
            except (SandboxError, HostError):
                return None  # it does not live, or does not answer: for `destroy`
            self._instances[sandbox_id] = instance
            return instance

    async def pause(self, instance: MicroVMInstance) -> None:
        """`Instance.pause`: with its disk held still and whole, so that it can be committed as it stands."""
        async with self._lock(instance.spec.sandbox_id):
            if instance.paused:
                return
            await instance.agent.freeze(True)
            try:
                await instance.control.execute("stop")
            except BaseException:
                await finish(instance.agent.freeze(False))
                raise
            instance.paused = True

    async def resume(self, instance: MicroVMInstance) -> None:
        """`Instance.resume`, with the clock set to the host's."""
        async with self._lock(instance.spec.sandbox_id):
            if not instance.paused:
                return
            await instance.control.execute("cont")
            instance.paused = False
            if not instance.linked:
                choice = await self.choose()
                await self._answer(instance, choice, _CALL_TIMEOUT[choice.accel])
            await instance.agent.identify(time_ns=time.time_ns())
            with suppress(SandyardError):  # its keeper was quicker
                await instance.agent.freeze(False)

    async def commit(self, instance: MicroVMInstance, target: Path, *, durable: bool) -> int:
        """`Instance.commit`. The guest's disk stands still while its image is exchanged for one above it."""
        spec = instance.spec
        _check_depth(spec)
        async with self._lock(spec.sandbox_id):
            own = self.layout.disk(spec.sandbox_id)
            number = disk.top(own)
            if number + 1 >= disk.DEEPEST:
                raise Unsupported(f"sandbox {spec.sandbox_id} was committed {number} times; no more is possible")
            await finish(self._exchange(instance, own, number))
            return await self._flatten(spec, number, target, durable)

    async def _exchange(self, instance: MicroVMInstance, own: Path, number: int) -> None:
        size = (own / disk.BLANK).stat().st_size
        new = await asyncio.to_thread(disk.above, own, disk.image(number), "qcow2", size, number + 1)
        arguments = {
            "node-name": await self._writing(instance),
            "snapshot-file": str(OWN / new.name),
            "snapshot-node-name": f"disk{number + 1}",
            "format": "qcow2",
            "mode": "existing",
        }
        try:
            if not instance.paused:
                await instance.agent.freeze(True)
            try:
                await instance.control.execute("blockdev-snapshot-sync", arguments)
            finally:
                if not instance.paused:
                    with suppress(SandyardError):
                        await instance.agent.freeze(False)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    async def _writing(self, instance: MicroVMInstance) -> str:
        """The name QEMU has for the image the guest writes to."""
        for each in await instance.control.execute("query-block"):
            if str(each.get("qdev", "")).find("dev-disk") >= 0:
                return str(each["inserted"]["node-name"])
        raise SandboxError(f"sandbox {instance.spec.sandbox_id}: its VMM has no disk")

    async def _flatten(self, spec: SandboxSpec, number: int, target: Path, durable: bool) -> int:
        own = self.layout.disk(spec.sandbox_id)
        scratch = own / f"layer-{secrets.token_hex(4)}"
        plan = Starter(self.settings, self.layout, self.cgroups).plan(spec, (), {})
        source, made = str(OWN / disk.image(number)), str(OWN / scratch.name)
        command = ["qemu-img", "convert", "-U", "-O", "qcow2", source, made]
        try:
            await self._in_thread(run_confined, plan, command, _COMMIT_TIMEOUT)
            return await self._in_thread(disk.take, scratch, target, durable)
        finally:
            scratch.unlink(missing_ok=True)

    async def halt(self, sandbox_id: str) -> None:
        async with self._lock(sandbox_id):
            own = self.layout.disk(sandbox_id)
            if load_halted(own) is not None:
                await finish(self._end(sandbox_id))
                return
            instance = self._instances.get(sandbox_id)
            if instance is None:
                raise SandboxError(f"sandbox {sandbox_id} cannot be halted: it does not live")
            if not instance.paused:
                await instance.agent.freeze(True)
            await finish(self._halt(instance.spec))

    async def _halt(self, spec: SandboxSpec) -> None:
        await asyncio.to_thread(save_halted, self.layout.disk(spec.sandbox_id), spec)
        await self._end(spec.sandbox_id)

    async def halted(self) -> Sequence[str]:
        def find() -> list[str]:
            entries = os.listdir(self.layout.disks) if self.layout.disks.is_dir() else []
            return sorted(name for name in entries if (self.layout.disks / name / "halted.json").exists())

        return await asyncio.to_thread(find)

    async def boot(self, spec: SandboxSpec) -> Instance:
        sandbox_id = spec.sandbox_id
        split_layers(spec.rootfs.layers)
        choice = await self._chosen()
        async with self._slots, self._lock(sandbox_id):
            own = self.layout.disk(sandbox_id)
            if load_halted(own) is None:
                raise CreateFailed("disk", f"sandbox {sandbox_id} is not halted")
            await finish(self._end(sandbox_id))
            try:
                instance = await self._bring_up(choice, spec, used=True)
                await asyncio.to_thread(forget_halted, own)
                return instance
            except BaseException:
                await finish(self._halt(spec))
                raise

    async def commit_halted(self, sandbox_id: str, target: Path, *, parent: Path | None = None) -> int:
        async with self._lock(sandbox_id):
            own = self.layout.disk(sandbox_id)
            spec = load_halted(own)
            if spec is None:
                raise SandboxError(f"sandbox {sandbox_id} is not halted")
            _check_depth(spec)
            home = self.layout.home(sandbox_id)
            home.mkdir(mode=0o700, exist_ok=True)
            try:
                return await self._flatten(spec, disk.top(own), target, True)
            finally:
                remove_tree(home)

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

    def said(self, sandbox_id: str) -> str:
        """What the VMM of a sandbox wrote last."""
        return last_lines(self.layout.home(sandbox_id) / "vmm.log")

    async def _chosen(self) -> Choice:
        try:
            return await self.choose()
        except HostError as error:
            raise CreateFailed("host", error.message, remedy=error.remedy) from error

    async def _try_out(self) -> Choice:
        engine, assets = find_engine(self.settings), await ready_assets(self.settings)
        allowed = candidates(self.settings)
        known = await asyncio.to_thread(remembered, self.layout, engine, assets, allowed)
        if known is not None:
            return Choice(engine, assets, *known)
        failures: list[str] = []
        for accel in allowed:
            choice = Choice(engine, assets, accel, 0.0)
            began = time.monotonic()
            try:
                await self._boot_probe(choice)
            except SandboxError as error:
                failures.append(f"{accel}: {error.message}")
                continue
            choice = replace(choice, boot_seconds=time.monotonic() - began)
            await remember(self.layout, choice)
            return choice
        raise HostError(f"no guest boots ({'; '.join(failures)})", remedy="set microvm.accel = tcg, or look at dmesg")

    async def _boot_probe(self, choice: Choice) -> None:
        sandbox_id = f"probe{secrets.token_hex(6)}"
        starter = Starter(self.settings, self.layout, self.cgroups)
        try:
            pid = await self._in_thread(starter.start_probe, choice, sandbox_id, self.layout.assets)
            record = load_running(self.layout.home(sandbox_id))
            if record is None:
                raise CreateFailed("vmm", "its record is gone")
            await self._come_up(self._hold(record.spec, pid), choice)
        finally:
            await finish(self._remove(sandbox_id))

    async def _bring_up(self, choice: Choice, spec: SandboxSpec, *, used: bool) -> MicroVMInstance:
        starter = Starter(self.settings, self.layout, self.cgroups)
        try:
            pid = await self._in_thread(lambda: starter.start(choice, spec, used=used))
        except OSError as error:
            raise CreateFailed("files", str(error)) from error
        return await self._come_up(self._hold(spec, pid), choice)

    async def _come_up(self, instance: MicroVMInstance, choice: Choice) -> MicroVMInstance:
        """Wait for the agent of a guest that boots; then it is known. Raises `CreateFailed`."""
        self._instances[instance.spec.sandbox_id] = instance
        try:
            await self._control(instance)
            await self._answer(instance, choice, _BOOT_TIMEOUT[choice.accel])
            await instance.agent.identify(time_ns=time.time_ns(), seed=secrets.token_bytes(32))
        except AgentLinkError as error:
            raise CreateFailed("agent", error.message) from error
        return instance

    async def _control(self, instance: MicroVMInstance) -> None:
        try:
            await instance.open_control(self.layout.qmp_socket(instance.spec.sandbox_id), _CONTROL_TIMEOUT)
        except SandboxError as error:
            raise CreateFailed("vmm", f"{error.message}: {self.said(instance.spec.sandbox_id)}") from error

    async def _answer(self, instance: MicroVMInstance, choice: Choice, timeout: float) -> None:
        """Give the instance a link whose agent answered, unless it dies first. Raises `CreateFailed`."""
        path, patience = self.layout.agent_socket(instance.spec.sandbox_id), _CALL_TIMEOUT[choice.accel]

        async def link() -> LinkAgent:
            return await _reach(path, timeout, patience)

        linking = asyncio.ensure_future(instance.replace_agent(link))
        death = asyncio.ensure_future(instance.wait_dead())
        try:
            await asyncio.wait((linking, death), return_when=asyncio.FIRST_COMPLETED)
            if not linking.done():
                raise CreateFailed("boot", f"{death.result().reason}: {death.result().detail}")
            linking.result()
        except AgentLinkError as error:
            said = ""
            with suppress(SandboxError):
                said = (await instance.console()).strip()[-300:]
            raise CreateFailed("agent", f"{error.message}; the console: {said or 'nothing'}") from error
        finally:
            linking.cancel()
            death.cancel()

    def _hold(self, spec: SandboxSpec, pid: int) -> MicroVMInstance:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise CreateFailed("vmm", f"it is gone: {self.said(spec.sandbox_id)}") from error
        return MicroVMInstance(spec, pid, pidfd, self)

    def _lock(self, sandbox_id: str) -> asyncio.Lock:
        return self._busy.setdefault(sandbox_id, asyncio.Lock())

    async def _in_thread(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        return await finish(asyncio.to_thread(call, *arguments))

    def _ids(self) -> set[str]:
        found = self.cgroups.ids()
        for parent in (self.layout.homes, self.layout.disks):
            if parent.is_dir():
                found.update(entry.name for entry in os.scandir(parent))
        return {name for name in found if _ID.fullmatch(name)}

    def _known(self, sandbox_id: str) -> bool:
        return self.layout.home(sandbox_id).exists() or self.layout.disk(sandbox_id).exists()

    async def _remove(self, sandbox_id: str) -> None:
        await self._end(sandbox_id)
        try:
            await asyncio.to_thread(remove_tree, self.layout.disk(sandbox_id))
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: its disk does not go: {error}") from error

    async def _end(self, sandbox_id: str) -> None:
        """End the VMM and remove all but the disk, whatever step it stopped at."""
        deadline = time.monotonic() + _DESTROY_TIMEOUT
        instance = self._instances.get(sandbox_id)
        if instance is not None:
            instance.kill()
            with suppress(TimeoutError):  # `clear` kills harder, and says what stays
                await asyncio.wait_for(instance.wait_dead(), _DESTROY_TIMEOUT / 2)
            await instance.release()

        def clear() -> None:
            record = load_running(self.layout.home(sandbox_id))
            if record is not None:
                _end_child(record.pid)
            self.cgroups.kill(sandbox_id, deadline)
            self.cgroups.remove(sandbox_id, deadline)
            remove_tree(self.layout.home(sandbox_id))

        try:
            await asyncio.to_thread(clear)
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox_id}: files do not go: {error}") from error
        self._instances.pop(sandbox_id, None)


async def _reach(path: Path, timeout: float, patience: float) -> LinkAgent:
    """Connect until the agent greets. QEMU may hold back for good what a guest sent while nobody was connected;
    only a new connection makes it go on. Raises `AgentLinkError`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        rest = deadline - loop.time()
        try:
            return await open_agent(path, min(rest, _GREETING), call_timeout=patience)
        except AgentLinkError:
            if rest <= _GREETING:
                raise


def _end_child(pid: int) -> None:
    """Kill and collect a VMM that this process started, also one that has not joined its groups yet."""
    with suppress(ChildProcessError):  # another's, or collected: only our own child's number cannot be another's
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _check_depth(spec: SandboxSpec) -> None:
    """Raises `Unsupported`."""
    if sum(layer.is_file() for layer in spec.rootfs.layers) >= LAYER_FILES_MAX:
        raise Unsupported(
            f"sandbox {spec.sandbox_id} stands on {LAYER_FILES_MAX} committed layers; no more can be added"
        )
