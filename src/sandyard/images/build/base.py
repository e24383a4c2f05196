"""What a build stands on: a workshop that starts sandboxes, an archive of uploaded files, a cache, a log.

The engine knows nothing of servers, tenants or places; whoever runs it brings these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from sandyard.errors import ClientError
from sandyard.guest.base import Agent
from sandyard.runtimes.base import Rootfs

BASE_STEP = "base"
FINAL_STEP = "finalize"
DEFAULT_USER = "user"


class BuildFailed(ClientError):
    """A build failed at `step`: "base", "finalize", or the number of a step, from 1. `network_missed`: its
    command said something that commands say where there is no network."""

    def __init__(self, step: str, message: str) -> None:
        super().__init__(message)
        self.step = step
        self.network_missed = False


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class Log(Protocol):
    def __call__(self, message: str, *, level: Level = Level.INFO, step: str | None = None) -> None: ...


class Bench(Protocol):
    """One sandbox of a build."""

    @property
    def agent(self) -> Agent: ...

    async def why_dead(self) -> str | None:
        """Why the sandbox died, None while it lives. Waits a moment for news of its death."""

    async def commit(self) -> tuple[Path, int]:
        """What was changed above its `Rootfs` as a new layer, and the layer's bytes on disk."""

    async def close(self) -> None:
        """Destroy the sandbox. Idempotent; its layers stay."""


class Workshop(Protocol):
    has_network: bool

    async def open(self, rootfs: Rootfs) -> Bench:
        """Start a sandbox. Raises `CapacityError` and `CreateFailed`."""


class Archives(Protocol):
    def path(self, files_hash: str) -> Path | None:
        """Where the tar archive of that hash lies; None if it was never uploaded or is gone."""


@dataclass(frozen=True, slots=True)
class State:
    """What the next step starts with. `workdir` None: the user's home."""

    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str = DEFAULT_USER

    @classmethod
    def of(cls, rootfs: Rootfs) -> State:
        return cls(dict(rootfs.env), rootfs.workdir, rootfs.user or DEFAULT_USER)

    def rootfs(self, layers: Sequence[Path]) -> Rootfs:
        return Rootfs(list(layers), dict(self.env), self.workdir, self.user)

    def with_env(self, added: Mapping[str, str]) -> State:
        return replace(self, env={**self.env, **added})


@dataclass(frozen=True, slots=True)
class Cached:
    """The result of a chain of steps."""

    layers: Sequence[Path]
    state: State
    size_bytes: int = 0  # of all layers that the steps added


class Cache(Protocol):
    def get(self, key: str) -> Cached | None:
        """None also where a layer of it is gone."""

    def put(self, key: str, value: Cached) -> None: ...


@dataclass(frozen=True, slots=True)
class Step:
    """`kind` in capitals: COPY, ADD, RUN, WORKDIR, USER, ENV, ARG. `files_hash` names the archive of a COPY."""

    kind: str
    args: Sequence[str] = ()
    files_hash: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """What the first step starts from. `key` changes whenever its files or settings do. `oci`: what the image says
    of how it is run, by the names of the OCI image specification; None where it was made from no image."""

    rootfs: Rootfs
    key: str
    label: str
    start_cmd: str | None = None
    ready_cmd: str | None = None
    oci: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    base: Base
    steps: Sequence[Step] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """A finished build. `size_bytes` of the layers it added; `cached` steps were not run. `oci` as of `Base`."""

    rootfs: Rootfs
    size_bytes: int
    cached: int
    start_cmd: str | None = None
    ready_cmd: str | None = None
    oci: Mapping[str, Any] | None = None
