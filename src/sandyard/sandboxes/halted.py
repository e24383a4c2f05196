"""What stands for the instance of a sandbox that is paused and takes nothing of the host but its disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandyard.errors import AgentLinkError
from sandyard.guest.base import Agent
from sandyard.runtimes.base import Death, Instance, Runtime, SandboxSpec, Usage


class HaltedInstance(Instance):
    """No process and no agent, but a disk, and where it is suspended its memory on it. It does not die: it is
    destroyed, or booted, or woken."""

    paused = True

    def __init__(self, runtime: Runtime, spec: SandboxSpec) -> None:
        self.spec = spec
        self._runtime = runtime

    @property
    def agent(self) -> Agent:
        raise AgentLinkError(f"sandbox {self.spec.sandbox_id} is paused")

    async def wait_dead(self) -> Death:
        never: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        return await never

    async def usage(self) -> Usage:
        return Usage(memory_bytes=0, memory_cache_bytes=0, cpu_seconds=0.0, disk_bytes=0, pids=0, oom_kills=0)

    async def commit(
        self, target: Path, *, durable: bool = True, parent: Path | None = None, memory: bool = False
    ) -> int:
        return await self._runtime.commit_halted(self.spec.sandbox_id, target, parent=parent, memory=memory)
