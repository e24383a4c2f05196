"""A runtime whose sandboxes have a way out: each gets a network slot before it is made, and loses it
with its life, on every path, because every path leads through the runtime.

A new, adopted or booted sandbox reaches nothing until `permit`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from sandyard.config import Settings
from sandyard.errors import Conflict, CreateFailed, HostError, NotFound, SandyardError, Unsupported
from sandyard.network.policy import Policy
from sandyard.network.slots import Slots
from sandyard.runtimes.base import Capabilities, HostMemory, Instance, Probe, Runtime, SandboxSpec
from sandyard.runtimes.finishing import finish

log = structlog.get_logger("sandyard.network")


class NetworkedRuntime(Runtime):
    """Wraps a runtime that can join a namespace; owns `slots`, from its construction to `close`."""

    def __init__(self, inner: Runtime, slots: Slots) -> None:
        if not inner.capabilities.network:
            message = f"runtime {inner.name} cannot give sandboxes a network"
            raise Unsupported(message, remedy="set network.egress = off, or sandbox.runtime = container")
        self.inner = inner
        self.slots = slots
        self.name = inner.name
        self.starts_at_once = inner.starts_at_once
        self.above_mb, self.start_mb = inner.above_mb, inner.start_mb

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities

    @property
    def pace(self) -> float:  # type: ignore[override]
        return self.inner.pace

    def host_memory(self) -> HostMemory | None:
        return self.inner.host_memory()

    def ready_bytes(self) -> int:
        return self.inner.ready_bytes()

    async def probe(self) -> Probe:
        probe = await self.inner.probe()
        if not probe.works:
            return probe
        try:
            detail = await self.slots.probe()
        except HostError as error:
            return Probe(False, error.message, error.remedy)
        return replace(probe, detail=f"{probe.detail}, network: {detail}")

    async def rest(self) -> None:
        await self.inner.rest()

    async def check(self) -> str | None:
        found = await self.inner.check()
        await self.slots.probe()
        return found

    async def create(self, spec: SandboxSpec) -> Instance:
        """Raises `CreateFailed` of stage `network` where there is no slot."""
        networked = await self._connected(spec)
        try:
            return await self.inner.create(networked)
        except BaseException:
            await finish(self.slots.drop(spec.sandbox_id))
            raise

    async def boot(self, spec: SandboxSpec) -> Instance:
        networked = await self._connected(spec)
        try:
            return await self.inner.boot(networked)
        except BaseException:
            await finish(self.slots.drop(spec.sandbox_id))
            raise

    async def list(self) -> Sequence[str]:
        halted = {*await self.inner.halted(), *await self.inner.suspended()}
        stray = [sandbox_id for sandbox_id in self.slots.ids() if sandbox_id not in halted]
        return sorted({*(await self.inner.list()), *stray})

    async def adopt(self, sandbox_id: str) -> Instance | None:
        instance = await self.inner.adopt(sandbox_id)
        if instance is not None:
            try:
                await self.slots.adopt(sandbox_id)
            except HostError as error:  # it lives on, cut off: less than it may have, never more
                log.error("network slot not adopted", sandbox=sandbox_id, error=str(error))
        return instance

    async def halt(self, sandbox_id: str) -> None:
        await self.inner.halt(sandbox_id)
        await self.slots.drop(sandbox_id)

    async def halted(self) -> Sequence[str]:
        return await self.inner.halted()

    async def suspend(self, sandbox_id: str) -> None:
        await self.inner.suspend(sandbox_id)
        await self.slots.drop(sandbox_id)

    async def suspended(self) -> Sequence[str]:
        return await self.inner.suspended()

    async def wake(self, spec: SandboxSpec) -> Instance:
        networked = await self._connected(spec)
        try:
            return await self.inner.wake(networked)
        except BaseException:
            await finish(self.slots.drop(spec.sandbox_id))
            raise

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        return await self.inner.commit_halted(sandbox_id, target, parent=parent, memory=memory)

    def needs(self, layer: Path) -> Path | None:
        return self.inner.needs(layer)

    def held_bytes(self, layers: Collection[Path], others: Collection[Path]) -> int | None:
        return self.inner.held_bytes(layers, others)

    def slim(self, layer: Path) -> bool:
        return self.inner.slim(layer)

    def merge(self, layer: Path, spare: Collection[Path]) -> bool:
        return self.inner.merge(layer, spare)

    async def destroy(self, sandbox_id: str) -> None:
        try:
            await self.inner.destroy(sandbox_id)
        finally:
            await finish(self.slots.drop(sandbox_id))

    async def close(self) -> None:
        try:
            await self.inner.close()
        finally:
            await self.slots.stop()

    async def _connected(self, spec: SandboxSpec) -> SandboxSpec:
        self.slots.start()
        try:
            slot = await self.slots.take(spec.sandbox_id)
        except (SandyardError, OSError) as error:
            remedy = error.remedy if isinstance(error, SandyardError) else None
            raise CreateFailed("network", str(error), remedy=remedy) from error
        return replace(spec, network=slot.path)


def networked(runtime: Runtime, settings: Settings) -> Runtime:
    """The runtime as `network.egress` wants it. Raises `Unsupported`."""
    return NetworkedRuntime(runtime, Slots(settings)) if settings.network.egress == "on" else runtime


def connected(runtime: Runtime, sandbox_id: str) -> bool:
    """Whether `permit` has something to change."""
    return isinstance(runtime, NetworkedRuntime) and runtime.slots.holds(sandbox_id)


async def permit(runtime: Runtime, sandbox_id: str, network: Mapping[str, Any]) -> None:
    """Let a sandbox reach what its stored `network` object allows, from here on, and nothing else.

    On a node without egress there is nothing to do. Raises `Conflict` for a sandbox that was made
    while this node had none."""
    if not isinstance(runtime, NetworkedRuntime):
        return
    try:
        await runtime.slots.replace(sandbox_id, Policy.of(network))
    except NotFound as error:
        raise Conflict(f"sandbox {sandbox_id} was made without a network", remedy="start another") from error
