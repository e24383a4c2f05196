"""A runtime without sandboxes: the in-memory twin, for tests of what stands on a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from sandyard.errors import AgentLinkError, CreateFailed, DeathReason
from sandyard.guest.base import Agent
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.base import Capabilities, Death, Instance, Probe, Runtime, SandboxSpec, Usage


class MemoryInstance(Instance):
    def __init__(self, spec: SandboxSpec, agent: Agent) -> None:
        self.spec = spec
        self._agent = agent
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    @property
    def agent(self) -> Agent:
        return self._agent

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def usage(self) -> Usage:
        if self._death.done():
            raise AgentLinkError(f"sandbox {self.spec.sandbox_id} is dead")
        pids = 1 + len(await self._agent.processes())
        return Usage(memory_bytes=0, memory_cache_bytes=0, cpu_seconds=0.0, disk_bytes=0, pids=pids, oom_kills=0)

    async def die(self, reason: DeathReason, detail: str = "") -> None:
        """End as if the sandbox had died of `reason`: for tests of what then happens."""
        if not self._death.done():
            self._death.set_result(Death(reason, detail))
        await self._agent.close()


class MemoryRuntime(Runtime):
    """`make_agent` gives each sandbox its agent. `fail_next` makes the next creates fail."""

    name = "memory"
    capabilities = Capabilities()

    def __init__(self, make_agent: Callable[[], Agent] = MemoryAgent) -> None:
        self.instances: dict[str, MemoryInstance] = {}
        self.fail_next: list[CreateFailed] = []
        self._make_agent = make_agent

    async def probe(self) -> Probe:
        return Probe(True, "in memory: nothing is isolated")

    async def create(self, spec: SandboxSpec) -> Instance:
        if self.fail_next:
            raise self.fail_next.pop(0)
        if spec.sandbox_id in self.instances:
            raise CreateFailed("spec", f"sandbox {spec.sandbox_id} exists already")
        instance = MemoryInstance(spec, self._make_agent())
        self.instances[spec.sandbox_id] = instance
        return instance

    async def list(self) -> Sequence[str]:
        return sorted(self.instances)

    async def adopt(self, sandbox_id: str) -> Instance | None:
        return self.instances.get(sandbox_id)

    async def destroy(self, sandbox_id: str) -> None:
        instance = self.instances.pop(sandbox_id, None)
        if instance is not None:
            await instance.die(DeathReason.KILLED)

    async def close(self) -> None:
        """Sandboxes of memory live as long as this object."""
