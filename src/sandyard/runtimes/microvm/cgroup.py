"""The control groups of VMMs: made here, found and emptied as those of containers are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import CreateFailed
from sandyard.runtimes.container.cgroups import Cgroups

_CONTROLLERS = ("", "memory", "pids", "cpu", "cpuacct", "freezer")
_PERIOD = 100_000  # microseconds
THREADS = 128
"""Of a VMM: one for each virtual CPU, and those that wait for its disks."""


@dataclass(frozen=True, slots=True)
class VmLimits:
    memory_bytes: int
    cpu: float


def tool_group(sandbox_id: str) -> str:
    """The group of a program that works on the disk of a sandbox; no sandbox's name has a dash."""
    return f"{sandbox_id}-tool"


def make_groups(cgroups: Cgroups, sandbox_id: str, limits: VmLimits) -> list[Path]:
    """The groups a VMM is to join. Raises `CreateFailed("limits")`; what was made then is for `Cgroups.remove`."""
    quota = max(1000, int(limits.cpu * _PERIOD))
    if cgroups.version == 2:
        values = {
            "memory.max": limits.memory_bytes,
            "memory.swap.max": 0,
            "pids.max": THREADS,
            "cpu.max": f"{quota} {_PERIOD}",
        }
    else:
        values = {
            "memory.limit_in_bytes": limits.memory_bytes,
            "pids.max": THREADS,
            "cpu.cfs_period_us": _PERIOD,
            "cpu.cfs_quota_us": quota,
        }
    made: list[Path] = []
    try:
        for root in _roots(cgroups):
            group = root / cgroups.parent / sandbox_id
            group.mkdir(parents=True)
            made.append(group)
            for name, value in values.items():
                file = group / name
                if file.exists():
                    file.write_text(str(value))
    except OSError as error:
        raise CreateFailed("limits", f"control group: {error}") from error
    return made


def move_groups(cgroups: Cgroups, name: str, sandbox_id: str, pid: int, limits: VmLimits) -> None:
    """Let a VMM that is in the groups of `name`, with these limits, be in those of a sandbox. Raises `CreateFailed`,
    `OSError`; what was made then is for `Cgroups.remove`, by both names."""
    if cgroups.version == 2:
        for group in make_groups(cgroups, sandbox_id, limits):
            (group / "cgroup.procs").write_text(str(pid))
        return
    # What a process had when it is moved stays with the group it leaves. So these get another name, as version 1 can.
    for root in _roots(cgroups):
        (root / cgroups.parent / name).rename(root / cgroups.parent / sandbox_id)


def _roots(cgroups: Cgroups) -> list[Path]:
    return list(dict.fromkeys(root for name, root in cgroups.roots.items() if name in _CONTROLLERS))
