"""A control group per session, where this process may make them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.envs.process.limits import SessionLimits
from sandyard.errors import SandboxError

_WANTED = ("memory", "pids")
_PATIENCE = 5.0  # seconds
_SLACK_MB = 32  # page tables and the like, and what a process shares with nobody any more


@dataclass(frozen=True, slots=True)
class SessionGroups:
    """`directories`: ours, one in each hierarchy, below which every session gets one. `missing` says why there is
    none, or which limit is not there; empty when all are."""

    directories: Sequence[Path] = ()
    missing: str = ""

    def remove(self) -> None:
        """Remove our own directories with those of sessions, none of which has a process any more. Blocking.

        Raises `SandboxError` naming what does not go."""
        deadline = time.monotonic() + _PATIENCE
        for directory in self.directories:
            with suppress(FileNotFoundError):
                for child in [Path(entry.path) for entry in os.scandir(directory) if entry.is_dir()]:
                    _remove(child, deadline)
            _remove(directory, deadline)


def make_groups(name: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> SessionGroups:
    """Directories called `name` in the hierarchies that limit memory and processes. Blocking; raises nothing."""
    if os.geteuid() != 0:
        return SessionGroups(missing="no control groups without root")
    made: list[Path] = []
    try:
        for root in dict.fromkeys(_roots(mountinfo).values()):
            directory = root / name
            directory.mkdir()
            made.append(directory)
            if (root / "cgroup.controllers").exists():
                (directory / "cgroup.subtree_control").write_text(" ".join(f"+{wanted}" for wanted in _WANTED))
    except OSError as error:
        SessionGroups(made).remove()
        return SessionGroups(missing=f"control groups: {error}")
    return SessionGroups(made, "" if made else "no control group limits memory and processes here")


def sweep_groups(prefix: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Remove the directories `PREFIX<pid>-…` of processes that were killed and so could not. Blocking; what does not
    go is left: it has a process, of another pid namespace perhaps."""
    for root in dict.fromkeys(_roots(mountinfo).values()) if os.geteuid() == 0 else ():
        for directory in root.glob(f"{prefix}*"):
            pid = directory.name.removeprefix(prefix).partition("-")[0]
            if not Path("/proc", pid).exists():
                with suppress(SandboxError):
                    SessionGroups([directory]).remove()


def group_limits(limits: SessionLimits) -> Mapping[str, str]:
    """Settings of a session's groups, in either version; those that a group does not have are left out."""
    memory = str((limits.memory_mb + _SLACK_MB) << 20)
    return {
        "memory.limit_in_bytes": memory,
        "memory.max": memory,
        "memory.swap.max": "0",
        "pids.max": str(limits.processes + 4),
    }


def _remove(directory: Path, deadline: float) -> None:
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # The kernel lets go of the last process a moment after it is reaped.
            if time.monotonic() > deadline:
                raise SandboxError(f"control group {directory} does not go: {error}") from error
        time.sleep(0.005)


def _roots(mountinfo: Path) -> dict[str, Path]:
    """Where each wanted controller is mounted; version 2 where it has both."""
    roots: dict[str, Path] = {}
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        where, (kind, _, options) = Path(before.split()[4]), after.split(" ", 2)
        if kind == "cgroup2" and set(_WANTED) <= set((where / "cgroup.subtree_control").read_text().split()):
            return dict.fromkeys(_WANTED, where)
        if kind == "cgroup":
            roots.update({name: where for name in options.split(",") if name in _WANTED})
    return roots
