"""The way of a microVM from its spec to an agent that answers: started, come up, or found again."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandyard.errors import AgentLinkError, CreateFailed, HostFull, SandboxError
from sandyard.guest.client import LinkAgent, open_agent
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm.choice import Choice, Engine
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.machine import Accel
from sandyard.runtimes.microvm.memory import suspended
from sandyard.runtimes.microvm.memory.fitting import fit_of, save_fit
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.record import load_halted, load_running
from sandyard.runtimes.microvm.said import printable
from sandyard.runtimes.microvm.stall import NOT_ON

if TYPE_CHECKING:
    from sandyard.runtimes.microvm.runtime import MicroVMRuntime

_BOOT_TIMEOUT: dict[Accel, float] = {"kvm": 20.0, "tcg": 180.0}
_CALL_TIMEOUT: dict[Accel, float] = {"kvm": 30.0, "tcg": 120.0}
_REJOIN_TIMEOUT: dict[Accel, float] = {"kvm": 10.0, "tcg": 40.0}
_CONTROL_TIMEOUT = 30.0
_GREETING = 15.0
OpenLink = Callable[[], Awaitable[LinkAgent]]


class BringUp:
    """Brings up microVMs of `runtime`."""

    def __init__(self, runtime: MicroVMRuntime) -> None:
        self._runtime = runtime
        self._host = runtime.host

    async def start(self, choice: Choice, spec: SandboxSpec, *, used: bool, tap: bool = False) -> MicroVMInstance:
        """Boot a sandbox, on the disk it had if it is `used`. `tap`: with an interface, whether it has a network or
        not. Raises `CreateFailed`; what was made then is left."""
        with self._host.spares.start():
            try:
                pid = await ended(lambda: self._start(choice, spec, used, tap))
            except OSError as error:
                raise CreateFailed("files", str(error)) from error
            return await self._come_up(self.hold(spec, pid), choice)

    def _start(self, choice: Choice, spec: SandboxSpec, used: bool, tap: bool) -> int:
        layout = self._host.layout
        pid = self._host.starter.start(choice, spec, used=used, tap=tap)
        fit = fit_of(self._host, choice, spec, layout.block(spec.sandbox_id))
        save_fit(layout.home(spec.sandbox_id), replace(fit, network=tap or fit.network))
        return pid

    async def start_probe(self, choice: Choice, sandbox_id: str) -> None:
        """Boot a guest that mounts nothing and answers. Raises `CreateFailed`; what was made is left."""
        pid = await ended(self._host.starter.start_probe, choice, sandbox_id, self._host.layout.assets)
        record = load_running(self._host.layout.home(sandbox_id))
        if record is None:
            raise CreateFailed("vmm", "its record is gone")
        await self._come_up(self.hold(record.spec, pid), choice)

    async def find(self, choice: Choice, sandbox_id: str) -> MicroVMInstance | None:
        """Take over one that an earlier process started; None where there is none. Raises `SandboxError` where
        it does not answer."""
        layout = self._host.layout
        record = load_running(layout.home(sandbox_id))
        if record is None or load_halted(layout.disk(sandbox_id)) is not None:
            return None
        if suspended.load(layout, sandbox_id) is not None:
            return None  # what still runs of it is nothing any more
        await ended(self._sweep, record.spec)
        instance = self.hold(record.spec, record.pid)
        try:
            state = await instance.open_control(layout.qmp_socket(sandbox_id), _CONTROL_TIMEOUT)
            instance.paused = state == "paused"
            if not instance.paused and not instance.stall.lasts:  # its agent cannot answer before that is over
                await self._rejoin(instance, choice)
        except BaseException:
            await instance.release()
            raise
        self._host.instances[sandbox_id] = instance
        return instance

    def _sweep(self, spec: SandboxSpec) -> None:
        """Remove what an earlier server was at when it was killed."""
        self._host.end_tools(spec.sandbox_id)
        Disks(self._host.layout, spec).sweep()

    async def _rejoin(self, instance: MicroVMInstance, choice: Choice) -> None:
        """Link to one that was up before, and let go on what its server may have held still when it ended. A server
        that starts does not wait long for guests, of which many may be hostile: it is tried on meanwhile. Raises
        `CreateFailed`."""
        try:
            async with asyncio.timeout(_REJOIN_TIMEOUT[choice.accel]):
                await self.relink(instance, choice)
                await instance.wake_up()
        except TimeoutError:
            await instance.drop_agent()
            instance.stall.begin(NOT_ON)

    async def relink(self, instance: MicroVMInstance, choice: Choice) -> None:
        """A new link to an agent that was up before. Raises `CreateFailed`."""
        path, patience = self._socket(instance), _CALL_TIMEOUT[choice.accel]
        await self._answer(instance, lambda: _reach(path, patience))

    def hold(self, spec: SandboxSpec, pid: int) -> MicroVMInstance:
        """The instance of a VMM that was started. Raises `CreateFailed` where it is gone."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise CreateFailed("vmm", f"it is gone: {self._host.said(spec.sandbox_id)}") from error
        return MicroVMInstance(spec, pid, pidfd, self._runtime)

    async def control(self, instance: MicroVMInstance, engine: Engine, qmp: Qmp | None = None) -> None:
        """Connect to a VMM that was started as `engine`, if not by `qmp` already, and limit what it does to the host's
        disk. Raises `CreateFailed`, also where it is another QEMU."""
        sandbox_id, rate = instance.spec.sandbox_id, self._host.settings.microvm.disk_mb_s << 20
        try:
            if qmp is None:
                await instance.open_control(self._host.layout.qmp_socket(sandbox_id), _CONTROL_TIMEOUT)
            else:
                instance.take_control(qmp)
            self._check_engine(instance, engine.version)
            if rate:
                await instance.limit_disk(rate)
        except SandboxError as error:
            raise CreateFailed("vmm", f"{error.message}: {self._host.said(sandbox_id)}") from error

    def _check_engine(self, instance: MicroVMInstance, expected: str) -> None:
        """What its memory is kept under, or comes from, is to be what runs. Raises `SandboxError`."""
        found = instance.control.version
        if found and found != expected:
            self._runtime.outdate()
            raise SandboxError(f"it is QEMU {found}, where {expected} was found: replaced just now")

    async def _come_up(self, instance: MicroVMInstance, choice: Choice) -> MicroVMInstance:
        """Wait for the agent of a guest that boots; from here on it is known. Raises `CreateFailed`."""
        self._host.instances[instance.spec.sandbox_id] = instance
        path, limit, patience = self._socket(instance), _BOOT_TIMEOUT[choice.accel], _CALL_TIMEOUT[choice.accel]
        try:
            await self.control(instance, choice.engine)
            # One connection, however long the boot takes: a second would queue a second greeting to the agent.
            await unless_full(instance, self._answer(instance, lambda: open_agent(path, limit, call_timeout=patience)))
            await unless_full(instance, identify(instance, secrets.token_bytes(64)))
        except AgentLinkError as error:
            raise CreateFailed("agent", error.message) from error
        return instance

    def _socket(self, instance: MicroVMInstance) -> Path:
        return self._host.layout.agent_socket(instance.spec.sandbox_id)

    async def _answer(self, instance: MicroVMInstance, open_link: OpenLink) -> None:
        """Give the instance a link whose agent answered, unless it dies first. Raises `CreateFailed`."""
        linking = asyncio.ensure_future(instance.replace_agent(open_link))
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
            raise CreateFailed("agent", f"{error.message}; the console: {printable(said) or 'nothing'}") from error
        finally:
            linking.cancel()
            death.cancel()
            await asyncio.gather(linking, death, return_exceptions=True)


async def unless_full(instance: MicroVMInstance, work: Coroutine[Any, Any, None]) -> None:
    """Await what a guest that is being made is asked to do. Raises `CreateFailed("disk")` as soon as the host has no
    room for what it writes, and what `work` raises."""
    try:
        await instance.unless_stalled(work)
    except HostFull as error:
        raise CreateFailed("disk", error.message, remedy="free space below paths.state and try again") from error


async def identify(instance: MicroVMInstance, seed: bytes) -> None:
    """Give a guest the host's time, and `seed` to its kernel's random numbers. Raises `CreateFailed("identity")` where
    it did not take one of them, `AgentLinkError`, `GuestError`."""
    await instance.agent.identify(time_ns=time.time_ns(), seed=seed)
    errors = [f"{part}: {error}" for part, error in instance.agent.identify_errors.items() if part != "hostname"]
    if errors:
        raise CreateFailed("identity", f"sandbox {instance.spec.sandbox_id} did not take what is its own ({errors[0]})")


async def _reach(path: Path, timeout: float) -> LinkAgent:
    """Connect until the agent greets. QEMU may hold back for good what a guest sent while nobody was connected;
    only a new connection makes it go on. Raises `AgentLinkError`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        rest = deadline - loop.time()
        try:
            return await open_agent(path, min(rest, _GREETING), call_timeout=timeout)
        except AgentLinkError:
            if rest <= _GREETING:
                raise
