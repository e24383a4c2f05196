"""Room on the host: on its disk, and in its memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from sandyard.errors import SandboxError, SandyardError

RESERVE = 128 << 20
"""Bytes that stay free on a disk for what others write there."""
_MEMINFO = Path("/proc/meminfo")


def check_room(
    where: Path | int,
    needed: int,
    what: str = "",
    *,
    reserve: int = RESERVE,
    error: Callable[..., SandyardError] = SandboxError,
) -> None:
    """Raises `error` where fewer than `needed` bytes and `reserve` are free on the disk of `where`, a path or a
    descriptor. `what` goes behind the bytes, and says what they are for."""
    found = os.statvfs(where)
    free = found.f_bavail * found.f_frsize
    if free < needed + reserve:
        at = f" at {where}" if isinstance(where, Path) else ""
        left = f"{free >> 20} MiB are free, of which {reserve >> 20} stay for others"
        message = f"no room for {needed >> 20} MiB{what}{at}: {left}"
        raise error(message, remedy="free disk space on the host")


def host_memory() -> tuple[int, int]:
    """(total, available) memory of this host in MiB."""
    fields: dict[str, int] = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            fields[name] = int(rest.split()[0]) // 1024
    return fields["MemTotal"], fields["MemAvailable"]
