"""What a guest's first process is told, as the content of a small disk (see `guest/PROTOCOL.md`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path

from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.launch import etc_files

DISK_MAX = 1 << 20
_MAX = DISK_MAX - 4096
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
PROBE = b"P\0\0".ljust(4096, b"\0")
"""Boot, answer, mount nothing."""


def configuration(spec: SandboxSpec, layers: int, subnet: IPv4Network, *, used: bool) -> bytes:
    """`layers`: how many lie above the base. `subnet`: of the guest and its gateway, if it has a network.
    `used`: on the disk it had, whose files are left alone.

    Raises `ValueError` for an environment that is too big."""
    content = encode([f"l{layers}", *settings_of(spec, subnet), *([] if used else _files(spec))])
    if len(content) > _MAX:
        raise ValueError(f"its environment takes {len(content)} bytes, where {_MAX} are the most")
    return content.ljust(-(-len(content) // 4096) * 4096, b"\0")


def bytes_of(path: Path) -> int:
    """Of the disk with a guest's configuration, as far as it can be one: a VMM may put anything in its place. Raises
    `OSError`."""
    return min(os.lstat(path).st_size, DISK_MAX)


def settings_of(spec: SandboxSpec, subnet: IPv4Network) -> list[str]:
    """The records that a guest may also be told later."""
    records = [f"p{spec.resources.pids}", f"m{spec.resources.memory_mb << 20}", f"h{spec.hostname}", "E"]
    records += [f"e{name}={value}" for name, value in {**_ENV, **spec.rootfs.env}.items()]
    if spec.network is not None:
        records.append(f"n{subnet[2]}/{subnet.prefixlen} {subnet[1]}")
    return records


def introduction(spec: SandboxSpec, subnet: IPv4Network) -> bytes:
    """What a copy of a guest is told, to be the sandbox of `spec`."""
    return encode([*settings_of(spec, subnet), *_files(spec)])


def _files(spec: SandboxSpec) -> list[str]:
    files = etc_files(spec).items()
    return ["d/etc", *(part for name, text in files for part in (f"f/etc/{name}", f"t{text}"))]


def encode(records: Sequence[str]) -> bytes:
    return b"".join(record.encode() + b"\0" for record in records) + b"\0"
