"""A sandbox as the server knows it, and what one is asked for with."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from sandyard.errors import SandboxDied
from sandyard.guest.base import Agent
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.sandboxes.log import SandboxLog
from sandyard.sandboxes.starting import NO_START, StartCommand
from sandyard.store.records import SandboxRecord


def new_id() -> str:
    """20 characters of `[a-z2-7]`, 100 random bits: unguessable, and fit for a host name."""
    return base64.b32encode(secrets.token_bytes(13))[:20].decode().lower()


def new_spec(sandbox_id: str, rootfs: Rootfs, resources: Resources, *, memory: bool) -> SandboxSpec:
    """Of a sandbox that is to be made; `memory`: with that of the topmost layer."""
    kept = rootfs.layers[0] if memory else None
    return SandboxSpec(sandbox_id, rootfs, resources, hostname=sandbox_id, memory=kept)


def _fields(value: Defaults | Resources) -> dict[str, Any]:
    """Like `dataclasses.asdict`, without its deep copies."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


class State(StrEnum):
    """Where a sandbox is in its life. A sandbox being created is known to nobody but its creator."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    KILLING = "killing"
    DEAD = "dead"

    @property
    def alive(self) -> bool:
        return self not in (State.KILLING, State.DEAD)


class OnTimeout(StrEnum):
    """What becomes of a sandbox whose time is over."""

    KILL = "kill"
    PAUSE = "pause"


class PauseMode(StrEnum):
    """What a paused sandbox keeps beside its files."""

    FULL = "full"  # processes and memory
    FILESYSTEM = "filesystem"  # nothing


@dataclass(frozen=True, slots=True)
class TimeoutPolicy:
    """`memory`: what a pause at the end of its time keeps. `auto_resume`: traffic to it, paused, resumes it."""

    on_timeout: OnTimeout = OnTimeout.KILL
    memory: bool = True
    auto_resume: bool = False


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What a caller asks for. `timeout` in seconds; `idle_timeout` None: no idle limit."""

    tenant: str
    template: str
    timeout: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    secured: bool = True
    lease_id: str | None = None
    idle_timeout: float | None = None
    network: Mapping[str, Any] = field(default_factory=dict)  # as the API has it, checked
    resources: Resources | None = None  # None: the template's, else the node's default
    extension: Mapping[str, Any] = field(default_factory=dict)  # what the node's extension is told, unread
    policy: TimeoutPolicy = TimeoutPolicy()


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a process gets where the caller says nothing: from the template."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = "user"

    @classmethod
    def of(cls, rootfs: Rootfs) -> Defaults:
        return cls(env=dict(rootfs.env), workdir=rootfs.workdir, user=rootfs.user or "user")


@dataclass(slots=True, eq=False)
class Sandbox:
    """A sandbox that runs or is paused. Times are seconds since the epoch, `last_used` of the monotonic clock.

    Of a paused one `pause_mode` says what it keeps; without its memory `instance` is a `HaltedInstance`.
    `placed`: a place in the admission is its own."""

    id: str
    tenant: str
    template: str
    template_id: str
    resources: Resources
    instance: Instance
    started_at: float
    end_at: float
    metadata: Mapping[str, str] = field(default_factory=dict)
    envs: Mapping[str, str] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=Defaults)
    secured: bool = True
    lease_id: str | None = None
    idle_timeout: float | None = None
    network: Mapping[str, Any] = field(default_factory=dict)  # as the API has it, checked
    extension: Mapping[str, Any] = field(default_factory=dict)  # what the node's extension is told, unread
    build_id: str = ""
    start: StartCommand = NO_START
    policy: TimeoutPolicy = TimeoutPolicy()
    state: State = State.RUNNING
    paused_at: float | None = None
    pause_mode: PauseMode | None = None
    placed: bool = True
    lifetime: float = 0.0  # seconds that were asked for last
    last_used: float = field(default_factory=time.monotonic)
    streams: int = 0  # requests in flight: a sandbox that serves one is not idle
    death: SandboxDied | None = None
    log: SandboxLog = field(default_factory=SandboxLog)

    @property
    def agent(self) -> Agent:
        return self.instance.agent

    @property
    def is_paused(self) -> bool:
        """Whether it counts as paused to those who know of running and paused only."""
        return self.state in (State.PAUSED, State.RESUMING)

    def touch(self) -> None:
        self.last_used = time.monotonic()

    def record(self, runtime: str) -> SandboxRecord:
        return SandboxRecord(
            id=self.id,
            tenant=self.tenant,
            runtime=runtime,
            template=self.template,
            template_id=self.template_id,
            metadata=dict(self.metadata),
            envs=dict(self.envs),
            defaults=_fields(self.defaults),
            resources=_fields(self.resources),
            secured=self.secured,
            started_at=self.started_at,
            end_at=self.end_at,
            idle_timeout=self.idle_timeout,
            lease_id=self.lease_id,
            extension=dict(self.extension),
            build_id=self.build_id,
            layers=[str(layer) for layer in self.instance.spec.rootfs.layers],
            start=self.start.record(),
            network=dict(self.network),
            on_timeout=self.policy.on_timeout.value,
            pause_memory=self.policy.memory,
            auto_resume=self.policy.auto_resume,
        )

    @staticmethod
    def spec_of(record: SandboxRecord) -> SandboxSpec:
        """What a halted sandbox boots with."""
        resources: dict[str, Any] = dict(record.resources)
        layers = [Path(layer) for layer in record.layers]
        rootfs = Rootfs(layers, record.defaults["env"], record.defaults["workdir"], record.defaults["user"])
        return SandboxSpec(record.id, rootfs, Resources(**resources), hostname=record.id)

    @classmethod
    def adopted(cls, record: SandboxRecord, instance: Instance) -> Sandbox:
        resources: dict[str, Any] = dict(record.resources)
        return cls(
            id=record.id,
            tenant=record.tenant,
            template=record.template,
            template_id=record.template_id,
            resources=Resources(**resources),
            instance=instance,
            started_at=record.started_at,
            end_at=record.end_at,
            metadata=record.metadata,
            envs=record.envs,
            defaults=Defaults(**record.defaults),
            secured=record.secured,
            lease_id=record.lease_id,
            idle_timeout=record.idle_timeout,
            extension=record.extension,
            lifetime=max(record.end_at - record.started_at, 0.0),
            build_id=record.build_id,
            start=StartCommand.of(record.start),
            network=record.network,
            policy=TimeoutPolicy(OnTimeout(record.on_timeout), record.pause_memory, record.auto_resume),
        )
