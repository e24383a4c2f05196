"""The contract of a runtime: how a sandbox is isolated, made, found again and destroyed.

`container/` implements it over an OCI engine, `memory.py` is the in-memory twin, `conformance.py`
is this contract as executable checks. A runtime knows nothing of owners, lifetimes or HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import DeathReason
from sandyard.guest.base import Agent


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: float = 1.0  # cores
    memory_mb: int = 512
    disk_mb: int = 1024  # what may be written above the template
    pids: int = 256


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do; the API refuses the rest before acting."""

    memory_snapshot: bool = False
    pause_keeps_memory: bool = False
    network: bool = False
    hard_disk_limit: bool = False


@dataclass(frozen=True, slots=True)
class Rootfs:
    """Where a sandbox starts from: unpacked, read-only layers, the topmost first."""

    layers: Sequence[Path]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    sandbox_id: str  # ^[a-z0-9]+$
    rootfs: Rootfs
    resources: Resources = Resources()
    hostname: str = "sandbox"


@dataclass(frozen=True, slots=True)
class Death:
    reason: DeathReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """A sandbox's use right now. Bytes, seconds."""

    memory_bytes: int
    memory_cache_bytes: int
    cpu_seconds: float
    disk_bytes: int
    pids: int
    oom_kills: int


@dataclass(frozen=True, slots=True)
class Probe:
    """What a runtime can do on this host, found out by doing it."""

    works: bool
    detail: str
    remedy: str | None = None


class Instance(ABC):
    """A live sandbox of a runtime."""

    spec: SandboxSpec

    @property
    @abstractmethod
    def agent(self) -> Agent: ...

    @abstractmethod
    async def wait_dead(self) -> Death:
        """Return when the sandbox is no more, with the reason. Any number of waiters.

        Event-driven (pidfd of PID 1), so an idle sandbox costs no wake-ups."""

    @abstractmethod
    async def usage(self) -> Usage: ...


class Runtime(ABC):
    name: str
    capabilities: Capabilities
    starts_at_once: int = 16
    """How many creates make progress at a time; the rest wait within `create`."""

    @abstractmethod
    async def probe(self) -> Probe:
        """Start a minimal sandbox and get an answer from it; never decides by a file's presence."""

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> Instance:
        """Make a sandbox and wait until its agent answers. Atomic: raises `CreateFailed` naming the
        stage (disk, engine, agent, …) with everything acquired released again."""

    @abstractmethod
    async def list(self) -> Sequence[str]:
        """Ids of everything of this runtime on this host, alive, dead or half made."""

    @abstractmethod
    async def adopt(self, sandbox_id: str) -> Instance | None:
        """Take over a sandbox made by an earlier process of ours; None if it does not live."""

    @abstractmethod
    async def destroy(self, sandbox_id: str) -> None:
        """Remove every trace. Idempotent, bounded in time, verified (cgroup empty, mounts gone,
        files gone), safe after a crash at any step of create or destroy. Raises `SandboxError`
        naming what would not go."""

    @abstractmethod
    async def close(self) -> None:
        """Release what this object holds; sandboxes go on living."""
