"""Where the microVM runtime keeps its things on the host."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import Settings
from sandyard.errors import HostError

_SOCKET_LIMIT = 107  # bytes of sun_path
_ID_LENGTH = 40
ROOT_IDS = 65536  # what container sandboxes take above `container.uid_base`


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below `run` (sockets, records of processes) and `state` (assets, images, disks)."""

    run: Path
    state: Path
    uid_base: int

    @classmethod
    def of(cls, settings: Settings) -> Layout:
        return cls(settings.paths.run.absolute(), settings.paths.state.absolute(), settings.container.uid_base)

    @property
    def assets(self) -> Path:
        return self.state / "microvm"

    @property
    def images(self) -> Path:
        return self.assets / "images"

    @property
    def disks(self) -> Path:
        return self.assets / "sandboxes"

    @property
    def memories(self) -> Path:
        """Of sandboxes: what no VMM may touch."""
        return self.assets / "memory"

    @property
    def keeps(self) -> Path:
        """Of sandboxes: what their VMMs may read, and not change."""
        return self.assets / "kept"

    @property
    def bases(self) -> Path:
        return self.assets / "bases"

    @property
    def homes(self) -> Path:
        return self.run / "microvm"

    @property
    def cgroup_parent(self) -> str:
        return f"sandyard-vm-{hashlib.sha256(str(self.run).encode()).hexdigest()[:8]}"

    def home(self, sandbox_id: str) -> Path:
        return self.homes / sandbox_id

    def disk(self, sandbox_id: str) -> Path:
        return self.disks / sandbox_id

    def memory(self, sandbox_id: str) -> Path:
        return self.memories / sandbox_id

    def kept(self, sandbox_id: str) -> Path:
        return self.keeps / sandbox_id

    def block(self, sandbox_id: str) -> Path:
        """The block image of its template that its guest has, whatever becomes of the template."""
        return self.memory(sandbox_id) / "base.img"

    def agent_socket(self, sandbox_id: str) -> Path:
        return self.home(sandbox_id) / "agent"

    def qmp_socket(self, sandbox_id: str) -> Path:
        return self.home(sandbox_id) / "qmp"

    def given(self, sandbox_id: str) -> Path:
        """What its VMM was given to read after it was started."""
        return self.memory(sandbox_id) / "given"

    @property
    def first_uid(self) -> int:
        """Of those that VMMs have."""
        return self.uid_base + ROOT_IDS

    def uid(self, sandbox_id: str) -> int:
        """The host user of the VMM of a sandbox that is there. Raises `OSError`."""
        uid = user_of(self.disk(sandbox_id))
        if uid == 0:  # its server was killed in the middle of making it
            raise OSError(errno.EPERM, "it is no VMM's", str(self.disk(sandbox_id)))
        return uid

    def prepare(self) -> None:
        """Make the directories. Raises `HostError`."""
        if len(os.fsencode(self.agent_socket("x" * _ID_LENGTH))) > _SOCKET_LIMIT:
            raise HostError(f"paths.run {self.run} is too long for Unix sockets", remedy="set a shorter paths.run")
        try:
            for path in (self.homes, self.assets, self.images, self.disks, self.memories, self.keeps, self.bases):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            remedy = "run as root or set paths.run and paths.state"
            if error.errno == errno.ENOSPC:
                remedy = "free space there, or set paths.run and paths.state to a bigger disk"
            raise HostError(f"directory {error.filename}: {error.strerror}", remedy=remedy) from error


def user_of(own: Path) -> int:
    """Whom a directory in `Layout.disks` is for: it has the group, so that it makes no file there; what earlier
    versions made it owns. Raises `OSError`."""
    found = own.lstat()
    return found.st_uid or found.st_gid
