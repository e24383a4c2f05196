"""The contract of a runtime: how a sandbox is isolated, made, found again and destroyed.

`container/` implements it over an OCI engine, `memory.py` is the in-memory twin, `conformance.py`
is this contract as executable checks. A runtime knows nothing of owners, lifetimes or HTTP.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandyard.errors import DeathReason, Unsupported
from sandyard.guest.base import Agent

MAX_LAYERS = 64
"""How many layers a root file system may have: each costs a mount at every start."""


@dataclass(frozen=True, slots=True)
class Resources:
    cpu: float = 1.0  # cores
    memory_mb: int = 512
    disk_mb: int = 1024  # what may be written above the template
    pids: int = 256


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime can do; the API refuses the rest before acting."""

    memory_snapshot: bool = False  # `commit` with `memory`, `SandboxSpec.memory`, `Runtime.suspend` and `wake`
    pause_keeps_memory: bool = False
    file_snapshot: bool = False  # `Instance.commit`
    halt: bool = False  # `Runtime.halt` and `Runtime.boot`: a pause that keeps files only
    network: bool = False  # `SandboxSpec.network`
    hard_disk_limit: bool = False
    small_commits: bool = True  # a `commit` with a `parent` costs what changed since, not the whole
    shared_kernel: bool = True  # the host's: root inside may do only what a container may

    @property
    def own_kernel(self) -> bool:
        return not self.shared_kernel


@dataclass(frozen=True, slots=True)
class Rootfs:
    """Where a sandbox starts from: read-only layers, the topmost first.

    A layer is an unpacked directory, or a file that `Instance.commit` of the same runtime made."""

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
    # A network namespace to join, beside which lie its sysfs (`sys`) and a `resolv.conf`; None: one of its
    # own with nothing in it.
    network: Path | None = None
    # The topmost layer of `rootfs`, of which the memory is to go on too: it was committed with it, by a runtime that
    # can (`Capabilities.memory_snapshot`). The sandbox then stands on the layers below, with that one's files as its
    # own: so the spec of its instance says.
    memory: Path | None = None


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
    """A live sandbox of a runtime. `paused`: it stands still, also since an earlier process of ours."""

    spec: SandboxSpec
    paused: bool = False

    @property
    @abstractmethod
    def agent(self) -> Agent: ...

    @abstractmethod
    async def wait_dead(self) -> Death:
        """Return when the sandbox is no more, with the reason. Any number of waiters.

        Event-driven (pidfd of PID 1), so an idle sandbox costs no wake-ups."""

    @abstractmethod
    async def usage(self) -> Usage: ...

    async def pause(self) -> None:
        """Stop every process where it stands; memory and pids stay. Idempotent. Until `resume` the
        agent does not answer. Raises `Unsupported` before anything happens, or `SandboxError` with
        the sandbox running."""
        raise Unsupported(f"{type(self).__name__} cannot pause a sandbox")

    async def resume(self) -> None:
        """Let the processes go on. Idempotent."""
        raise Unsupported(f"{type(self).__name__} cannot resume a sandbox")

    async def commit(
        self, target: Path, *, durable: bool = True, parent: Path | None = None, memory: bool = False
    ) -> int:
        """Write what was changed above `spec.rootfs` to `target`, a new name: an immutable layer for
        other sandboxes' `Rootfs.layers`. With `memory` its processes and what they have in memory are kept too, of
        the same instant, for `SandboxSpec.memory`. Returns its bytes on the host's disk.

        All files are from one instant; a running sandbox stands still for that long and then goes
        on, a paused one stays paused. Atomic: on failure nothing is left at `target`. A `durable` layer
        outlives a crash of the host once this returns. `parent` is the layer of an earlier commit of this
        sandbox: `target` may then be kept as what changed since, and needs it (see `Runtime.needs`). Raises
        `Unsupported`, or `SandboxError` (the host's disk is full, …)."""
        raise Unsupported(f"{type(self).__name__} cannot commit a sandbox's files")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What all sandboxes of a runtime have of the host's memory, in bytes; what they share is counted once. `cache`
    of it are pages of files, which the host takes back when it needs them."""

    bytes: int
    cache: int


class Runtime(ABC):
    name: str
    capabilities: Capabilities
    pace: float = 1.0
    """How many times slower than on bare hardware a sandbox may be: software emulation. Time limits of checks
    and of what waits for a start are multiplied by it."""
    starts_at_once: int = 16
    """How many creates make progress at a time; the rest wait within `create`."""
    above_mb: int = 0
    """MiB of the host's memory that a sandbox may take beyond its `memory_mb`: for a kernel of its own, its VMM."""
    start_mb: int = 0
    """MiB of the host's memory that one takes as soon as it starts, whatever runs in it."""

    @abstractmethod
    async def probe(self) -> Probe:
        """Start a minimal sandbox and get an answer from it; never decides by a file's presence."""

    async def rest(self) -> None:  # noqa: B027 - nothing does, with most
        """End what stands ready for the next start, where anything does; after that start it is made again."""

    async def check(self) -> str | None:
        """Before a server starts: what its sandboxes are made with, in a line, where that is not known without a look.
        Raises `HostError` with the remedy where none could be made."""
        return None

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

    async def halt(self, sandbox_id: str) -> None:
        """End a sandbox's processes and keep its disk, for `boot`. Idempotent; a failure on the way
        is repaired by repeating it. Raises `Unsupported` before anything happens."""
        raise Unsupported(f"{type(self).__name__} cannot halt a sandbox")

    async def halted(self) -> Sequence[str]:
        """Ids of halted sandboxes, also those of an earlier process or boot of the host."""
        return []

    async def boot(self, spec: SandboxSpec) -> Instance:
        """Start a halted sandbox on the disk it left, with a new boot id. `spec` is as for `create`.

        Raises `CreateFailed`, and the sandbox is halted as before."""
        raise Unsupported(f"{type(self).__name__} cannot boot a halted sandbox")

    async def suspend(self, sandbox_id: str) -> None:
        """End a sandbox and keep its disk, its processes and what they have in memory, for `wake`. Idempotent. It
        survives a boot of the host. Raises `Unsupported` before anything happens, `SandboxError` with the sandbox as
        it was. Needs `Capabilities.memory_snapshot`."""
        raise Unsupported(f"{type(self).__name__} cannot suspend a sandbox")

    async def suspended(self) -> Sequence[str]:
        """Ids of suspended sandboxes, also those of an earlier process or boot of the host. `halt` of one takes its
        memory away, `commit_halted` copies it."""
        return []

    async def wake(self, spec: SandboxSpec) -> Instance:
        """Let a suspended sandbox go on where it stood, with the host's time. `spec` is as for `create`.

        Raises `CreateFailed`, and the sandbox is suspended as before."""
        raise Unsupported(f"{type(self).__name__} cannot wake a sandbox")

    async def commit_halted(
        self, sandbox_id: str, target: Path, *, parent: Path | None = None, memory: bool = False
    ) -> int:
        """`Instance.commit` of a halted sandbox; with `memory` of a suspended one."""
        raise Unsupported(f"{type(self).__name__} cannot commit a halted sandbox's files")

    def host_memory(self) -> HostMemory | None:
        """None where nothing is counted. Blocking, and quick."""
        return None

    def ready_bytes(self) -> int:
        """What stands ready for the next starts, and ends by `rest`, has of the host's memory; it is part of what
        `host_memory` says. Blocking, and quick."""
        return 0

    def needs(self, layer: Path) -> Path | None:
        """The layer that a committed one cannot be without, if it is kept as what differs from it. Everything whose
        name is that of `layer`, a dot and more belongs to it. Blocking; raises `SandboxError` where it is damaged."""
        return None

    def held_bytes(self, layers: Collection[Path], others: Collection[Path]) -> int | None:
        """Of committed layers that share what lies beside them: the bytes they hold together on the host's disk,
        without what the `others` or everybody's sandboxes hold too. None where layers share nothing so. Blocking."""
        return None

    def slim(self, layer: Path) -> bool:
        """Remove of a committed layer what can be made again and nobody wanted lately; whether something went. For
        one that no sandbox stands on. Blocking."""
        return False

    def merge(self, layer: Path, spare: Collection[Path]) -> bool:
        """Let a committed layer need none, or fewer, of those that it `needs` and that are `spare`: nobody else wants
        them. Whether it does; not where that frees too little. Its content stays as it is, whoever reads it
        meanwhile, and so it does where this is killed. Blocking; raises `SandboxError` with nothing changed."""
        return False

    @abstractmethod
    async def destroy(self, sandbox_id: str) -> None:
        """Remove every trace. Idempotent, bounded in time, verified (cgroup empty, mounts gone,
        files gone), safe after a crash at any step of create or destroy. Raises `SandboxError`
        naming what would not go."""

    @abstractmethod
    async def close(self) -> None:
        """Release what this object holds; sandboxes go on living."""
