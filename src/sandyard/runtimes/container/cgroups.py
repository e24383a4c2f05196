"""The control groups of sandboxes, in version 2 or in version 1 (one tree per controller).

The engine makes a sandbox's groups; this module finds, reads, empties and removes them. All of
them lie in one group per run directory, so that two servers on a host never see each other's.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import HostError, SandboxError

_NEEDED = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Counters:
    """What the kernel counted for one sandbox. Bytes, seconds."""

    memory: int = 0
    cache: int = 0
    cpu_seconds: float = 0.0
    pids: int = 0
    oom_kills: int = 0


@dataclass(frozen=True, slots=True)
class Cgroups:
    """`roots` maps each controller (in version 1; "" alone in version 2) to its mounted root.

    `parent` is the name of our group in each root. `unmount` are mounts an engine must not see:
    a version 2 tree without controllers beside version 1, which crun takes for the real one.
    """

    roots: Mapping[str, Path]
    parent: str
    unmount: tuple[Path, ...] = ()

    @property
    def version(self) -> int:
        return 2 if "" in self.roots else 1

    @property
    def swap_limit(self) -> bool:
        """Whether this kernel can limit swap (version 1 without swap accounting cannot)."""
        return self.version == 2 or (self.roots["memory"] / "memory.memsw.limit_in_bytes").exists()

    def engine_path(self, sandbox_id: str) -> str:
        return f"/{self.parent}/{sandbox_id}"

    def ids(self) -> set[str]:
        found: set[str] = set()
        for root in self.roots.values():
            parent = root / self.parent
            if parent.is_dir():
                found.update(entry.name for entry in os.scandir(parent) if entry.is_dir(follow_symlinks=False))
        return found

    def pids(self, sandbox_id: str) -> set[int]:
        """Host pids of every process of the sandbox."""
        found: set[int] = set()
        for group in self._groups(sandbox_id):
            found.update(int(line) for line in _read(group / "cgroup.procs").split())
        return found

    def holds(self, sandbox_id: str, pid: int) -> bool:
        """Whether `pid` is a process of the sandbox: a recycled pid never is."""
        path = self.engine_path(sandbox_id)
        return any(line.split(":", 2)[2].endswith(path) for line in _read(Path(f"/proc/{pid}/cgroup")).splitlines())

    def read(self, sandbox_id: str) -> Counters:
        """Read the counters; zeros where the group is gone."""
        return self._read_v2(sandbox_id) if self.version == 2 else self._read_v1(sandbox_id)

    def taken(self, sandbox_id: str = "") -> tuple[int, int]:
        """Bytes of memory of one, or of all sandboxes together, and how many of them are pages of files that can be had
        back."""
        name, root = ("memory.current", "") if self.version == 2 else ("memory.usage_in_bytes", "memory")
        total, stat = self._file(root, sandbox_id, name), self._file(root, sandbox_id, "memory.stat")
        if self.version == 2:
            return _number(total), _field(stat, "file") - _field(stat, "shmem")
        return _number(total), _field(stat, "total_cache") - _field(stat, "total_shmem")

    def kill(self, sandbox_id: str, deadline: float) -> None:
        """Kill every process of the sandbox and wait until there is none.

        `deadline` is on the monotonic clock; raises `SandboxError` naming the pids that stay.
        """
        pause = 0.0005
        while pids := self.pids(sandbox_id):
            if self.version == 2:
                _write(self.roots[""] / self.parent / sandbox_id / "cgroup.kill", "1")
            for pid in pids:
                _kill(pid)
            self.thaw(sandbox_id)  # version 1: what is frozen dies only then
            if time.monotonic() > deadline:
                raise SandboxError(f"sandbox {sandbox_id}: processes {sorted(pids)} do not die")
            time.sleep(pause)
            pause = min(pause * 2, 0.05)

    @property
    def freezer(self) -> bool:
        """Whether this host can freeze a sandbox."""
        return self.version == 2 or "freezer" in self.roots

    def freeze(self, sandbox_id: str, seconds: float) -> None:
        """Stop every process of the sandbox where it stands. Blocking.

        Raises `SandboxError`, with the sandbox running, where some do not stop within `seconds`."""
        deadline = time.monotonic() + seconds
        pause = 0.0002
        try:
            self._write_freezer(sandbox_id, True)
            while not self.frozen(sandbox_id):
                if time.monotonic() > deadline:
                    raise SandboxError(f"sandbox {sandbox_id}: its processes do not freeze within {seconds:g} s")
                time.sleep(pause)
                pause = min(pause * 2, 0.02)
        except BaseException:
            self.thaw(sandbox_id)
            raise

    def thaw(self, sandbox_id: str) -> None:
        """Let the processes of the sandbox go on. Idempotent."""
        if self.freezer:
            self._write_freezer(sandbox_id, False)

    def frozen(self, sandbox_id: str) -> bool:
        """Whether every process of the sandbox stands still."""
        if self.version == 2:
            return _field(self._file("", sandbox_id, "cgroup.events"), "frozen") == 1
        return self.freezer and self._file("freezer", sandbox_id, "freezer.state").strip() == "FROZEN"

    def _write_freezer(self, sandbox_id: str, stop: bool) -> None:
        if self.version == 2:
            _write(self.roots[""] / self.parent / sandbox_id / "cgroup.freeze", "1" if stop else "0")
        else:
            group = self.roots["freezer"] / self.parent / sandbox_id
            _write(group / "freezer.state", "FROZEN" if stop else "THAWED")

    def remove(self, sandbox_id: str, deadline: float) -> None:
        """Remove the sandbox's groups, which hold no process any more. Idempotent."""
        for group in self._groups(sandbox_id):
            for child in sorted(_descendants(group), key=lambda path: -len(path.parts)):
                _rmdir(child, deadline)
            _rmdir(group, deadline)

    def remove_parent(self) -> None:
        """Remove our own group if no sandbox is left in it."""
        for root in self.roots.values():
            try:
                (root / self.parent).rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EBUSY, errno.ENOTEMPTY):
                    raise

    def prepare(self) -> None:
        """Make version 2 hand memory, pids and cpu down to our group; version 1 needs nothing.

        Inside a container of its own, the root has processes and may not delegate: they move into
        a leaf first. Raises `HostError` where the host does not permit it.
        """
        if self.version == 1:
            return
        root = self.roots[""]
        wanted = " ".join(f"+{name}" for name in _NEEDED)
        try:
            (root / self.parent).mkdir(exist_ok=True)
            try:
                (root / "cgroup.subtree_control").write_text(wanted)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                _move_to_leaf(root)
                (root / "cgroup.subtree_control").write_text(wanted)
            (root / self.parent / "cgroup.subtree_control").write_text(wanted)
        except OSError as error:
            raise HostError(
                f"cgroup {root}: cannot delegate memory, pids and cpu: {error}",
                remedy="run as root with a writable cgroup tree (in Docker: --privileged --cgroupns=private)",
            ) from error

    def _groups(self, sandbox_id: str) -> Iterator[Path]:
        for root in dict.fromkeys(self.roots.values()):
            group = root / self.parent / sandbox_id
            if group.is_dir():
                yield group

    def _file(self, controller: str, sandbox_id: str, name: str) -> str:
        return _read(self.roots[controller] / self.parent / sandbox_id / name)

    def _read_v2(self, sandbox_id: str) -> Counters:
        return Counters(
            memory=_number(self._file("", sandbox_id, "memory.current")),
            cache=_field(self._file("", sandbox_id, "memory.stat"), "file"),
            cpu_seconds=_field(self._file("", sandbox_id, "cpu.stat"), "usage_usec") / 1e6,
            pids=_number(self._file("", sandbox_id, "pids.current")),
            oom_kills=_field(self._file("", sandbox_id, "memory.events"), "oom_kill"),
        )

    def _read_v1(self, sandbox_id: str) -> Counters:
        return Counters(
            memory=_number(self._file("memory", sandbox_id, "memory.usage_in_bytes")),
            cache=_field(self._file("memory", sandbox_id, "memory.stat"), "total_cache"),
            cpu_seconds=_number(self._file("cpuacct", sandbox_id, "cpuacct.usage")) / 1e9,
            pids=_number(self._file("pids", sandbox_id, "pids.current")),
            oom_kills=_field(self._file("memory", sandbox_id, "memory.oom_control"), "oom_kill"),
        )


def detect_cgroups(parent: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> Cgroups:
    """Find how this host mounts its control groups. `parent` is the name of our own group.

    Raises `HostError` where memory, pids and cpu cannot be limited.
    """
    version1: dict[str, Path] = {}
    version2: list[Path] = []
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        where, (kind, _, options) = Path(before.split()[4]), after.split(" ", 2)
        if kind == "cgroup2":
            version2.append(where)
        elif kind == "cgroup":
            for name in options.split(","):
                if name in (*_NEEDED, "cpuacct", "cpuset", "devices", "freezer", "blkio", "name=systemd"):
                    version1[name] = where
    for root in version2:
        if set(_NEEDED) <= set(_read(root / "cgroup.controllers").split()):
            return Cgroups({"": root}, parent)
    missing = [name for name in (*_NEEDED, "cpuacct") if name not in version1]
    if missing:
        raise HostError(
            f"control groups: no controller {', '.join(missing)} is mounted",
            remedy="mount cgroup2 at /sys/fs/cgroup or boot with systemd.unified_cgroup_hierarchy=1",
        )
    return Cgroups(version1, parent, tuple(version2))


def _move_to_leaf(root: Path) -> None:
    leaf = root / "sandyard-host"
    leaf.mkdir(exist_ok=True)
    for pid in _read(root / "cgroup.procs").split():
        _write(leaf / "cgroup.procs", pid)


def _descendants(group: Path) -> list[Path]:
    return [Path(where) for where, _, _ in os.walk(group) if Path(where) != group]


def _rmdir(group: Path, deadline: float) -> None:
    pause = 0.0002
    while True:
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # The kernel lets go of the last process a moment after it is reaped.
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise SandboxError(f"cgroup {group} does not go: {error}") from error
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # gone: what was wanted
        os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
        return ""
    except OSError as error:
        if error.errno == errno.ENODEV:  # the group went between open and read
            return ""
        raise


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except (FileNotFoundError, ProcessLookupError):
        pass  # the group or the process went first
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _number(text: str) -> int:
    return int(text.strip() or 0)


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
