"""A runtime without sandboxes: the in-memory twin, for tests of what stands on a runtime.

A layer that it commits is a file, see `memory_layers`. Where it keeps memory, one that is suspended keeps its
processes; copies have none, but know by the file `LAYER.memory` that theirs goes on.
"""

from __future__ import annotations

import asyncio
import base64
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandyard.errors import AgentLinkError, CreateFailed, DeathReason, SandboxError, Unsupported
from sandyard.guest.base import Agent, FileType
from sandyard.guest.memory import MemoryAgent
from sandyard.runtimes.base import MAX_LAYERS, Capabilities, Death, Instance, Probe, Runtime, SandboxSpec, Usage
from sandyard.runtimes.memory_layers import memory_of, merge_layer, parent_layer, read_layer, write_layer

BOOT_ID = "/proc/sys/kernel/random/boot_id"
_DEPTH = 64  # of directories


class MemoryInstance(Instance):
    def __init__(self, spec: SandboxSpec, agent: Agent, *, keeps_memory: bool = False) -> None:
        self.spec = spec
        self._keeps_memory = keeps_memory
        self.paused = False
        self._agent = agent
        self._death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    @property
    def agent(self) -> Agent:
        """Refuses while paused, where a real one would keep silent: a test is not to hang."""
        if self.paused:
            raise AgentLinkError(f"sandbox {self.spec.sandbox_id} is paused")
        return self._agent

    async def wait_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def usage(self) -> Usage:
        if self._death.done():
            raise AgentLinkError(f"sandbox {self.spec.sandbox_id} is dead")
        pids = 1 + len(await self._agent.processes())
        return Usage(memory_bytes=0, memory_cache_bytes=0, cpu_seconds=0.0, disk_bytes=0, pids=pids, oom_kills=0)

    async def pause(self) -> None:
        self._check_alive()
        self.paused = True

    async def resume(self) -> None:
        self._check_alive()
        self.paused = False

    async def commit(
        self, target: Path, *, durable: bool = True, parent: Path | None = None, memory: bool = False
    ) -> int:
        self._check_alive()
        if memory and not self._keeps_memory:
            raise Unsupported(f"sandbox {self.spec.sandbox_id} cannot be committed with its memory")
        if len(self.spec.rootfs.layers) >= MAX_LAYERS:
            raise Unsupported(f"sandbox {self.spec.sandbox_id} stands on {MAX_LAYERS} layers already")
        return await asyncio.to_thread(write_layer, target, await self.files(), parent, memory=memory)

    async def files(self) -> list[dict[str, Any]]:
        """Everything the agent has below `/`, parents first."""
        return await _files(self._agent)

    async def die(self, reason: DeathReason, detail: str = "") -> None:
        """End as if the sandbox had died of `reason`: for tests of what then happens."""
        if not self._death.done():
            self._death.set_result(Death(reason, detail))
        await self._agent.close()

    def take_agent(self) -> Agent:
        """End the sandbox, and keep what its agent has."""
        self._check_alive()
        self._death.set_result(Death(DeathReason.KILLED))
        return self._agent

    def _check_alive(self) -> None:
        if self._death.done():
            raise SandboxError(f"sandbox {self.spec.sandbox_id} is dead")


class MemoryRuntime(Runtime):
    """`make_agent` gives each sandbox its agent. `fail_next` makes the next creates, boots and wakes fail.
    `keeps_memory`: it can what `Capabilities.memory_snapshot` says."""

    name = "memory"

    def __init__(self, make_agent: Callable[[], Agent] = MemoryAgent, *, keeps_memory: bool = False) -> None:
        self.capabilities = Capabilities(
            memory_snapshot=keeps_memory, pause_keeps_memory=True, file_snapshot=True, halt=True
        )
        self._suspended: dict[str, Agent] = {}
        self.instances: dict[str, MemoryInstance] = {}
        self.fail_next: list[CreateFailed] = []
        self._make_agent = make_agent
        self._halted: dict[str, list[dict[str, Any]]] = {}

    async def probe(self) -> Probe:
        return Probe(True, "in memory: nothing is isolated")

    async def create(self, spec: SandboxSpec) -> Instance:
        if spec.sandbox_id in await self.list():
            raise CreateFailed("spec", f"sandbox {spec.sandbox_id} exists already")
        if spec.memory is not None:
            return await self._copy(spec, spec.memory)
        committed = [layer for layer in spec.rootfs.layers if layer.is_file()]
        return await self._make(spec, read_layer(committed[0]) if committed else [])

    async def _copy(self, spec: SandboxSpec, layer: Path) -> Instance:
        below = list(spec.rootfs.layers)[1:]
        if [layer, *below] != list(spec.rootfs.layers) or not memory_of(layer).exists():
            raise CreateFailed("snapshot", f"{layer.name} has no memory, or is not on top")
        return await self._make(
            replace(spec, rootfs=replace(spec.rootfs, layers=below), memory=None), read_layer(layer)
        )

    async def _make(self, spec: SandboxSpec, files: Sequence[dict[str, Any]]) -> Instance:
        instance = self._hold(spec, self._make_agent())
        await _fill(instance.agent, files)
        return instance

    def _hold(self, spec: SandboxSpec, agent: Agent) -> Instance:
        if self.fail_next:
            raise self.fail_next.pop(0)
        instance = MemoryInstance(spec, agent, keeps_memory=self.capabilities.memory_snapshot)
        self.instances[spec.sandbox_id] = instance
        return instance

    async def list(self) -> Sequence[str]:
        return sorted({*self.instances, *self._halted, *self._suspended})

    async def adopt(self, sandbox_id: str) -> Instance | None:
        return self.instances.get(sandbox_id)

    async def halt(self, sandbox_id: str) -> None:
        if sandbox_id in self._halted:
            return
        if (agent := self._suspended.get(sandbox_id)) is not None:
            self._halted[sandbox_id] = await _files(agent)
            await self._suspended.pop(sandbox_id).close()
            return
        instance = self.instances.get(sandbox_id)
        if instance is None:
            raise SandboxError(f"sandbox {sandbox_id} cannot be halted: it does not live")
        self._halted[sandbox_id] = await instance.files()
        self.instances.pop(sandbox_id)
        await instance.die(DeathReason.KILLED)

    async def halted(self) -> Sequence[str]:
        return sorted(self._halted)

    async def boot(self, spec: SandboxSpec) -> Instance:
        files = self._halted.get(spec.sandbox_id)
        if files is None:
            raise CreateFailed("disk", f"sandbox {spec.sandbox_id} is not halted")
        instance = await self._make(spec, files)
        self._halted.pop(spec.sandbox_id)
        return instance

    def needs(self, layer: Path) -> Path | None:
        return parent_layer(layer)

    def merge(self, layer: Path, spare: Collection[Path]) -> bool:
        return merge_layer(layer, spare)

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        agent, files = self._suspended.get(sandbox_id), self._halted.get(sandbox_id)
        if agent is not None:
            files = await _files(agent)
        if files is None or (memory and agent is None):
            raise SandboxError(f"sandbox {sandbox_id} is not halted, or has no memory")
        return await asyncio.to_thread(write_layer, target, files, parent, memory=memory)

    async def suspend(self, sandbox_id: str) -> None:
        if not self.capabilities.memory_snapshot:
            await super().suspend(sandbox_id)
        if sandbox_id in self._suspended:
            return
        instance = self.instances.get(sandbox_id)
        if instance is None:
            raise SandboxError(f"sandbox {sandbox_id} cannot be suspended: it does not live")
        self._suspended[sandbox_id] = instance.take_agent()
        self.instances.pop(sandbox_id)

    async def suspended(self) -> Sequence[str]:
        return sorted(self._suspended)

    async def wake(self, spec: SandboxSpec) -> Instance:
        agent = self._suspended.get(spec.sandbox_id)
        if agent is None:
            raise CreateFailed("snapshot", f"sandbox {spec.sandbox_id} is not suspended")
        instance = self._hold(spec, agent)
        self._suspended.pop(spec.sandbox_id)
        return instance

    async def destroy(self, sandbox_id: str) -> None:
        self._halted.pop(sandbox_id, None)
        if (agent := self._suspended.pop(sandbox_id, None)) is not None:
            await agent.close()
        instance = self.instances.pop(sandbox_id, None)
        if instance is not None:
            await instance.die(DeathReason.KILLED)

    async def close(self) -> None:
        """Sandboxes of memory live as long as this object."""


async def _files(agent: Agent) -> list[dict[str, Any]]:
    found = []
    for info in await agent.list_dir("/", _DEPTH):
        if info.path.startswith("/proc"):
            continue
        data = b""
        if info.type is FileType.FILE:
            data = b"".join([chunk async for chunk in agent.read_file(info.path)])
        kept = {"path": info.path, "mode": info.mode, "uid": info.uid, "metadata": dict(info.metadata)}
        found.append({**kept, "type": info.type.value, "data": base64.b64encode(data).decode()})
    return found


async def _fill(agent: Agent, files: Sequence[dict[str, Any]]) -> None:
    """Give a fresh agent its files, and a boot id."""
    if not isinstance(agent, MemoryAgent):
        return  # a test's own, which has nothing to be filled
    known = {info.path for info in await agent.list_dir("/", _DEPTH)}
    for each in files:
        owner = str(each["uid"])
        if each["type"] == FileType.DIRECTORY.value:
            if each["path"] not in known:
                await agent.make_dir(each["path"], owner, each["mode"])
        else:
            data = base64.b64decode(each["data"])
            await agent.write_file(each["path"], data, owner, each["mode"], each["metadata"])
    kept = {each["path"] for each in files}
    for path in known - kept if files else ():
        await agent.remove(path)
    await agent.write_file(BOOT_ID, os.fsencode(f"{uuid.uuid4()}\n"), mode=0o444)
