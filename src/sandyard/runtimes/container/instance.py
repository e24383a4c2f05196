"""A live container sandbox: its agent, its death, its use."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sandyard.errors import AgentLinkError, DeathReason, Unsupported
from sandyard.guest.base import Agent
from sandyard.runtimes.base import Death, Instance, SandboxSpec, Usage

if TYPE_CHECKING:
    from sandyard.runtimes.container.runtime import ContainerRuntime


class ContainerInstance(Instance):
    """Owns the pidfd of PID 1. Made on the running event loop; `release` gives everything back."""

    def __init__(self, spec: SandboxSpec, pid: int, pidfd: int, runtime: ContainerRuntime) -> None:
        self.spec = spec
        self.pid = pid
        self.paused = False
        self._agent: Agent | None = None
        self._pidfd = pidfd
        self._runtime = runtime
        self._cgroups = runtime.cgroups
        self._disks = runtime.disks
        self._killed = False
        self._loop = asyncio.get_running_loop()
        self._death: asyncio.Future[Death] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)

    @property
    def agent(self) -> Agent:
        if self._agent is None:
            raise AgentLinkError(f"sandbox {self.spec.sandbox_id}: no link to its agent")
        return self._agent

    async def replace_agent(self, agent: Agent) -> None:
        """Take a new link; the old one is closed."""
        old, self._agent = self._agent, agent
        if old is not None:
            await old.close()

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def usage(self) -> Usage:
        counters = await asyncio.to_thread(self._cgroups.read, self.spec.sandbox_id)
        disk = await asyncio.to_thread(self._disks.used, self.spec.sandbox_id)
        return Usage(
            memory_bytes=counters.memory,
            memory_cache_bytes=counters.cache,
            cpu_seconds=counters.cpu_seconds,
            disk_bytes=disk,
            pids=counters.pids,
            oom_kills=counters.oom_kills,
        )

    @property
    def linked(self) -> bool:
        return self._agent is not None

    async def pause(self) -> None:
        await self._runtime.pause(self)

    async def resume(self) -> None:
        await self._runtime.resume(self)

    async def commit(
        self, target: Path, *, durable: bool = True, parent: Path | None = None, memory: bool = False
    ) -> int:
        if memory:
            raise Unsupported("a container cannot be committed with its memory")
        return await self._runtime.commit(self, target, durable=durable, parent=parent)

    def kill(self) -> None:
        """Kill PID 1; the kernel kills the rest of its pid namespace before it reports the death."""
        self._killed = True
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):  # it died first
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def release(self) -> None:
        """Close the link and stop watching; the sandbox itself is left alone. Idempotent.

        A death already seen is still reported; who waits for one that was not is cancelled.
        """
        self._close_pidfd()
        self._death.cancel()
        if self._agent is not None:
            await self._agent.close()

    def _on_exit(self) -> None:
        self._close_pidfd()
        _reap(self.pid)
        if not self._death.done():
            self._death.set_result(self._why())

    def _why(self) -> Death:
        if self._killed:
            return Death(DeathReason.KILLED)
        kills = self._cgroups.read(self.spec.sandbox_id).oom_kills
        if kills:
            limit = self.spec.resources.memory_mb
            return Death(DeathReason.OOM, f"memory limit of {limit} MiB reached, {kills} processes killed")
        return Death(DeathReason.CRASHED, f"PID 1 ({self.pid} on the host) ended by itself")

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _reap(pid: int) -> None:
    """Collect PID 1 where this server is its parent (it is the host's init, or its sub-reaper)."""
    with suppress(ChildProcessError):  # somebody else's child, as usual
        os.waitpid(pid, os.WNOHANG)
