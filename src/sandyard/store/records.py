"""What the store keeps, as the rest of the server sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandyard.errors import DeathReason


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """A sandbox that has been promised to somebody. Times are seconds since the epoch."""

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
