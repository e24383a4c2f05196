"""What the store keeps, as the rest of the server sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandyard.errors import DeathReason


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """A sandbox that has been promised to somebody. Times are seconds since the epoch.

    `state` is running or paused; `layers` are paths, the topmost first; `start` holds start_cmd and
    ready_cmd where there are such. Of a paused one: since when, and with what (full, filesystem)."""

    id: str
    tenant: str
    runtime: str
    template: str
    template_id: str
    metadata: Mapping[str, str]
    envs: Mapping[str, str]
    defaults: Mapping[str, Any]  # env, workdir and user that come from the template
    resources: Mapping[str, float]
    secured: bool
    started_at: float
    end_at: float
    on_timeout: str = "kill"
    idle_timeout: float | None = None
    lease_id: str | None = None
    extension: Mapping[str, Any] = field(default_factory=dict)
    build_id: str = ""
    layers: Sequence[str] = ()
    start: Mapping[str, str] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    pause_memory: bool = True
    auto_resume: bool = False
    state: str = "running"
    paused_at: float | None = None
    pause_mode: str | None = None


@dataclass(frozen=True, slots=True)
class DeathRecord:
    """A sandbox that is no more."""

    id: str
    tenant: str
    reason: DeathReason
    detail: str
    dead_at: float


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A dead-man lease: while it is renewed, its sandboxes live. `ttl` in seconds."""

    id: str
    tenant: str
    ttl: float
    created_at: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TemplateRecord:
    """Something to start from, with its history. `kind` is template or snapshot; `source` the sandbox
    of a snapshot. Names are unique within a tenant."""

    id: str
    tenant: str
    kind: str
    names: Sequence[str]
    public: bool
    source: str | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """One state of a template. `status`: waiting, building, ready, error.

    `layers` are paths, the topmost first; `config` holds env, workdir, user, start and ready command,
    resources; `reason` {message, step?} of an error. `size_bytes` of what this build added."""

    id: str
    template_id: str
    status: str
    layers: Sequence[str]
    config: Mapping[str, Any]
    reason: Mapping[str, Any] | None
    size_bytes: int
    created_at: float
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class TagRecord:
    template_id: str
    tag: str
    build_id: str
    created_at: float
