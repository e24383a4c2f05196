"""A live microVM: its agent, its control socket, its death, its use."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sandyard.errors import AgentLinkError, DeathReason, GuestError, HostFull, SandboxError, SandyardError
from sandyard.guest.client import LinkAgent
from sandyard.runtimes.base import Death, Instance, SandboxSpec, Usage
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.machine import device_of
from sandyard.runtimes.microvm.qmp import Qmp, QmpError
from sandyard.runtimes.microvm.said import part, printable, records, shown, text
from sandyard.runtimes.microvm.stall import NOT_ON, STALLED, Stall

if TYPE_CHECKING:
    from sandyard.runtimes.microvm.runtime import MicroVMRuntime

STOP_TIMEOUT = 120.0
"""Seconds for what QEMU answers only when all is on the host's disk."""
_AGAIN = 10.0
_CONSOLE = 4096  # bytes at its end
_T = TypeVar("_T")
_ENDED = ("shutdown", "guest-panicked", "internal-error")


class MicroVMInstance(Instance):
    """Owns the pidfd of the VMM and both sockets. Made on the running event loop; `release` gives all back."""

    def __init__(self, spec: SandboxSpec, pid: int, pidfd: int, runtime: MicroVMRuntime) -> None:
        self.spec = spec
        self.pid = pid
        self.paused = False
        self.frozen = False  # its processes and disk are, or may be, though it is to run
        self.still_seconds = 0.0  # how long it stood still the last time that its memory was taken
        self._still_since = 0.0
        self.qmp: Qmp | None = None
        self._agent: LinkAgent | None = None
        self._pidfd = pidfd
        self._runtime = runtime
        self._host = runtime.host
        self._killed = False
        self._ending: asyncio.Task[None] | None = None
        self.stall = Stall(spec.sandbox_id, lambda: runtime.try_again(self))
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[Death] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    @property
    def agent(self) -> LinkAgent:
        if self._agent is None:
            raise AgentLinkError(f"sandbox {self.spec.sandbox_id}: no link to its agent")
        return self._agent

    @property
    def linked(self) -> bool:
        return self._agent is not None

    @property
    def control(self) -> Qmp:
        if self.qmp is None:
            raise QmpError(f"sandbox {self.spec.sandbox_id}: no connection to its VMM")
        return self.qmp

    async def open_control(self, path: Path, timeout: float) -> str:
        """Connect to the VMM; its state ("running", "paused", …). Raises `QmpError`."""
        self.qmp = await Qmp.connect(path, timeout, self._on_event)
        state = await self.status()
        if state in _ENDED:
            self._guest_ended(state)
        if state == STALLED:
            self.stall.begin()
        return state

    async def status(self) -> str:
        """QEMU's word for what the machine does. Raises `QmpError`."""
        return await self.control.query("query-status", lambda said: text(part(said, "status")))

    def take_control(self, qmp: Qmp) -> None:
        """Its VMM was connected to already; its guest has not run yet."""
        qmp.name, qmp.on_event = self.spec.sandbox_id, self._on_event
        self.qmp = qmp

    async def limit_disk(self, bytes_per_second: int) -> None:
        """How much it may read and write on its disk; 0: without a limit. Raises `QmpError`."""
        kinds = ("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr")
        rate = {"bps": bytes_per_second, **dict.fromkeys(kinds, 0)}
        if (device := await self.control.query("query-block", _device)) is not None:
            await self.control.execute("block_set_io_throttle", {"id": device, **rate})

    async def disk_node(self) -> str:
        """The name QEMU has for the image the guest writes to. Raises `SandboxError`."""
        node = await self.control.query("query-block", _node)
        if node is None:
            raise SandboxError(f"sandbox {self.spec.sandbox_id}: its VMM has no disk")
        return node

    async def replace_agent(self, open_link: Callable[[], Awaitable[LinkAgent]]) -> None:
        """Close the old link, then take a new one: a port serves one at a time."""
        await self.drop_agent()
        self._agent = await open_link()

    async def drop_agent(self) -> None:
        old, self._agent = self._agent, None
        if old is not None:
            await old.close()

    async def check_room(self) -> None:
        """Raises `HostFull` where it stands still for want of room, and `QmpError`."""
        if self.stall.full.is_set():
            if await self.status() == STALLED:
                raise self.stall.error()
            self.stall.full.clear()

    async def stand_still(self) -> None:
        """Processes, disk, link and machine stand still, so that nothing changes its memory. Where that fails,
        `go_on` is due all the same. Raises `SandboxError`, `GuestError`; `HostFull` as soon as there is no room for
        what it writes first."""
        await self.check_room()
        self.frozen, self._still_since = True, time.monotonic()
        await self.unless_stalled(self.agent.stand_still())
        await self.control.execute("stop", timeout=STOP_TIMEOUT)

    async def go_on(self) -> None:
        """After `stand_still`, whatever came of it; the link goes on only when the machine does. Where that fails it
        is tried until it does. Raises `SandboxError`, `GuestError`."""
        try:
            try:
                if not self.stall.full.is_set():  # it goes on by itself when there is room
                    await self.control.execute("cont")
            finally:
                if self._agent is not None:
                    self._agent.go_on()
            await self.thaw()
            self.still_seconds = time.monotonic() - self._still_since
        except HostFull:
            return
        except BaseException:
            if not self._killed:
                self.stall.begin(NOT_ON)
            raise

    async def thaw(self) -> None:
        """Let its disk and its processes go on. Raises `SandboxError`, `GuestError`."""
        if self.frozen:
            await self.unless_stalled(self.agent.freeze(False))
            self.frozen = False

    async def wake_up(self) -> None:
        """`thaw` of one that nothing is known of; where it fails it is tried until it does not, or is killed."""
        self.frozen = True
        try:
            await self.thaw()
        except HostFull:
            return
        except (AgentLinkError, GuestError):
            self.stall.begin(NOT_ON)

    async def stop_again(self) -> None:
        """After a resume that failed on its way: paused as before, and a next one may do better."""
        if not self.paused:
            try:
                async with asyncio.timeout(_AGAIN):
                    await self.unless_stalled(self.agent.stand_still())
            except (SandyardError, TimeoutError):
                await self.drop_agent()  # what came through its link would change what stands still
        with suppress(SandboxError):  # of a VMM that is gone its death is told
            await self.control.execute("stop", timeout=STOP_TIMEOUT)
        self.paused = True

    async def unless_stalled(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await what its agent is asked to do, but not while it stands still for want of room. Raises `HostFull`, and
        what `work` raises."""
        task, full = asyncio.ensure_future(work), asyncio.ensure_future(self.stall.full.wait())
        try:
            await asyncio.wait((task, full), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self.stall.error()
        finally:
            task.cancel()
            full.cancel()
            await asyncio.gather(task, full, return_exceptions=True)
        return task.result()

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def usage(self) -> Usage:
        """Memory, disk and processes as the guest's kernel counts them, CPU as the host's does."""
        host = await asyncio.to_thread(self._host.cgroups.read, self.spec.sandbox_id)
        if self.paused:
            taken = await asyncio.to_thread(Disks(self._host.layout, self.spec).used_bytes)
            return Usage(host.memory, host.cache, host.cpu_seconds, taken, 0, 0)
        use = await self.unless_stalled(self.agent.use())
        return Usage(use.memory, use.cache, host.cpu_seconds, use.disk, use.pids, use.oom_kills)

    async def pause(self) -> None:
        await self._runtime.pause(self)

    async def resume(self) -> None:
        await self._runtime.resume(self)

    async def commit(
        self, target: Path, *, durable: bool = True, parent: Path | None = None, memory: bool = False
    ) -> int:
        return await self._runtime.commit(self, target, durable=durable, parent=parent, memory=memory)

    def kill(self) -> None:
        """Send SIGKILL to the VMM; with it goes everything in the guest."""
        self._killed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def release(self) -> None:
        """Close both sockets and stop watching; the guest is left alone. Idempotent."""
        self._close_pidfd()
        self._death.cancel()
        self.stall.end()
        if self._ending is not None:
            self._ending.cancel()
        if self._agent is not None:
            await self._agent.close()
        if self.qmp is not None:
            await self.qmp.close()

    async def console(self) -> str:
        """The end of what the guest's kernel said."""
        arguments = {"device": "console", "size": _CONSOLE, "format": "utf8"}
        return (await self.control.query("ringbuf-read", text, arguments))[-_CONSOLE:]

    def _on_event(self, name: str, data: Mapping[str, Any]) -> None:
        if name in ("SHUTDOWN", "GUEST_PANICKED"):
            self._guest_ended(shown(data.get("reason", name.lower())))
        if name == "RESUME":
            self.stall.full.clear()
        if name == "BLOCK_IO_ERROR" and data.get("action") == "stop":
            self.stall.begin()

    def _guest_ended(self, how: str) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(how))

    async def _end(self, how: str) -> None:
        """The guest stands still after its end: learn why, then let the VMM go."""
        tail = ""
        with suppress(SandboxError):
            tail = await self.console()
        if not self._death.done():
            self._death.set_result(_death_of(how, tail))
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_exit(self) -> None:
        self._close_pidfd()
        self.stall.end()
        with suppress(ChildProcessError):  # of an earlier server, it is the host's init that collects it
            os.waitpid(self.pid, os.WNOHANG)
        if not self._death.done():
            self._death.set_result(self._why())

    def _why(self) -> Death:
        if self._killed:
            return Death(DeathReason.KILLED)
        if self._host.cgroups.read(self.spec.sandbox_id).oom_kills:
            return Death(DeathReason.OOM, "the VMM went beyond what the host allows it")
        return Death(DeathReason.HOST, f"the VMM ({self.pid}) was ended: {self._host.said(self.spec.sandbox_id)}")

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _drive(said: object) -> Mapping[str, Any] | None:
    """What QEMU says of the one that the guest writes to. Raises `Odd`, as those below do."""
    return next((each for each in records(said) if device_of("disk") in text(each.get("qdev", ""))), None)


def _device(said: object) -> str | None:
    found = _drive(said)
    return None if found is None else text(found["qdev"])


def _node(said: object) -> str | None:
    found = _drive(said)
    return None if found is None else text(part(part(found, "inserted"), "node-name"))


def _death_of(how: str, console: str) -> Death:
    lines = [printable(line.strip()) for line in console.splitlines() if line.strip()]
    panic = next((line for line in lines if "Kernel panic" in line), None)
    if panic is not None:
        reason = DeathReason.OOM if "Out of memory" in panic or "out of memory" in panic else DeathReason.CRASHED
        return Death(reason, panic[-300:])
    last = f" ({lines[-1][-200:]})" if lines else ""
    return Death(DeathReason.CRASHED, f"the guest ended: {printable(how)}{last}")
