"""A sandbox as the server knows it, and what one is asked for with."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from sandyard.errors import SandboxDied
from sandyard.guest.base import Agent
from sandyard.runtimes.base import Instance, Resources, Rootfs
from sandyard.sandboxes.log import SandboxLog
from sandyard.store.records import SandboxRecord


def new_id() -> str:
    """20 characters of `[a-z2-7]`, 100 random bits: unguessable, and fit for a host name."""
    return base64.b32encode(secrets.token_bytes(13))[:20].decode().lower()


def _fields(value: Defaults | Resources) -> dict[str, Any]:
    """Like `dataclasses.asdict`, without its deep copies."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


class State(StrEnum):
    """Where a sandbox is in its life. A sandbox being created is known to nobody but its creator."""

    RUNNING = "running"
    PAUSED = "paused"  # no runtime pauses yet; listed so that filters know the word
    KILLING = "killing"
    DEAD = "dead"


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
    """A live sandbox. Times are seconds since the epoch, `last_used` of the monotonic clock."""

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
    state: State = State.RUNNING
    last_used: float = field(default_factory=time.monotonic)
    streams: int = 0  # requests in flight: a sandbox that serves one is not idle
    death: SandboxDied | None = None
    log: SandboxLog = field(default_factory=SandboxLog)

    @property
    def agent(self) -> Agent:
        return self.instance.agent

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
        )

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
        )
