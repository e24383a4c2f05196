"""Where a container sandbox keeps its things on the host, and the record that finds it again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sandyard.errors import HostError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec

_SOCKET_LIMIT = 107  # bytes of sun_path
_ID_LENGTH = 40
FALLBACK_MOUNTS = Path("/run/sandyard-mnt")


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below `run` (sockets, records) and `state` (disks, caches)."""

    run: Path
    state: Path

    @property
    def sandboxes(self) -> Path:
        return self.run / "sandboxes"

    @property
    def engine(self) -> Path:
        return self.run / "engine"

    @property
    def disks(self) -> Path:
        return self.state / "sandboxes"

    @property
    def blanks(self) -> Path:
        return self.state / "disks"

    @property
    def cgroup_parent(self) -> str:
        return f"sandyard-{hashlib.sha256(str(self.run).encode()).hexdigest()[:8]}"

    def home(self, sandbox_id: str) -> Path:
        return self.sandboxes / sandbox_id

    def socket(self, sandbox_id: str) -> Path:
        return self.home(sandbox_id) / "agent.sock"

    def prepare(self) -> None:
        """Make the directories. Raises `HostError` where they cannot be, or are too deep for sockets."""
        longest = self.socket("x" * _ID_LENGTH)
        if len(os.fsencode(longest)) > _SOCKET_LIMIT:
            raise HostError(f"paths.run {self.run} is too long for Unix sockets", remedy="set a shorter paths.run")
        try:
            for path, mode in ((self.run, 0o711), (self.sandboxes, 0o700), (self.engine, 0o700)):
                path.mkdir(mode=mode, parents=True, exist_ok=True)
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(f"paths: {error}", remedy="run as root or set paths.run and paths.state") from error

    def mounts(self) -> Path:
        """The directory over which launchers mount, each in its own namespace.

        The sandbox's root user, nobody on the host, must be able to walk to it.
        """
        base = self.run / "mnt"
        if not all(parent.stat().st_mode & 0o001 for parent in (self.run, *self.run.resolve().parents)):
            base = FALLBACK_MOUNTS
        for path in (base, base / "disk", base / "layer", base / "rootfs"):
            path.mkdir(mode=0o711, parents=True, exist_ok=True)
        return base


def install_agent(binary: Path, mounts: Path) -> Path:
    """Copy the agent to where the sandbox's root user can reach it, by content; return the copy."""
    stat = binary.stat()
    copy = mounts / f"agent-{_digest(binary, stat.st_size, stat.st_mtime_ns)}"
    if not copy.exists():
        scratch = mounts / f".agent-{os.getpid()}-{os.urandom(4).hex()}"
        scratch.write_bytes(binary.read_bytes())
        scratch.chmod(0o755)
        scratch.rename(copy)
    return copy


@lru_cache(maxsize=4)
def _digest(binary: Path, size: int, mtime_ns: int) -> str:
    return hashlib.sha256(binary.read_bytes()).hexdigest()[:16]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def new_boot_id(home: Path) -> Path:
    """Make the boot id of a sandbox that is about to start: a file that is mounted over the host's."""
    path = home / "boot_id"
    path.write_text(f"{uuid.uuid4()}\n")
    path.chmod(0o444)
    return path


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` atomically."""
    scratch = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    scratch.write_text(json.dumps(content))
    scratch.rename(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None where there is none, or half of one after a crash."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def encode_spec(spec: SandboxSpec) -> dict[str, Any]:
    """A record of `spec`, which also says during which boot of the host it was written."""
    rootfs = {**asdict(spec.rootfs), "layers": [str(layer) for layer in spec.rootfs.layers]}
    return {
        "boot_id": boot_id(),
        "sandbox_id": spec.sandbox_id,
        "hostname": spec.hostname,
        "resources": asdict(spec.resources),
        "rootfs": rootfs,
        "network": str(spec.network) if spec.network is not None else None,
    }


def decode_spec(record: Mapping[str, Any]) -> SandboxSpec:
    rootfs = record["rootfs"]
    return SandboxSpec(
        sandbox_id=record["sandbox_id"],
        rootfs=Rootfs(**{**rootfs, "layers": [Path(layer) for layer in rootfs["layers"]]}),
        resources=Resources(**record["resources"]),
        hostname=record["hostname"],
        network=Path(record["network"]) if record["network"] is not None else None,
    )


def save_record(home: Path, spec: SandboxSpec) -> None:
    """Write what `adopt` needs, before the engine starts."""
    write_json(home / "state.json", encode_spec(spec))


def load_record(home: Path) -> SandboxSpec | None:
    """The spec a sandbox was made from; None where the record is missing or of an earlier boot."""
    record = read_json(home / "state.json")
    if record is None or record["boot_id"] != boot_id():
        return None
    return decode_spec(record)


def engine_pid(home: Path) -> int | None:
    """The host pid of PID 1 as the engine wrote it."""
    try:
        return int((home / "pid").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def remove_tree(path: Path) -> None:
    """Remove a directory of ours. Idempotent."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if path.exists():  # something in it went meanwhile
            shutil.rmtree(path)
