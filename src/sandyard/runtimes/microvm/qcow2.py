"""Images of disks that a VMM may have written: looked at before anything opens them, and opened by what they stand on.

A header can name other files: one that lies below, and one that has the data. QEMU follows the first where it is not
told what lies below, and the second in any case. So the chain is always told (`backing`, also that there is none),
and an image with the second is refused.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sandyard.errors import SandboxError

Format = Literal["raw", "qcow2"]
# Magic, version, offset and length of the name of what lies below, cluster bits, size, encryption, tables of levels,
# reference counts and snapshots, features that must be known.
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQ")
_MAGIC, _VERSION, _CLUSTER_BITS = b"QFI\xfb", 3, 16


@dataclass(frozen=True, slots=True)
class Image:
    """A file of a chain, where whoever opens it sees it."""

    path: Path
    format: Format = "qcow2"


@dataclass(frozen=True, slots=True)
class Header:
    """`size`: bytes of the disk. `whole`: nothing lies below."""

    size: int
    whole: bool


def read_header(descriptor: int, name: str) -> Header:
    """Raises `SandboxError` where the image `name` is none of those that are made here, `OSError`."""
    data = os.pread(descriptor, _HEADER.size, 0)
    if len(data) < _HEADER.size:
        raise SandboxError(f"{name} is no image of a disk")
    magic, version, below, _, bits, size, crypt, _, _, _, _, snapshots, _, features = _HEADER.unpack(data)
    if magic != _MAGIC or version != _VERSION or bits != _CLUSTER_BITS:
        raise SandboxError(f"{name} is no image of a disk")
    if features or crypt or snapshots:  # an external data file is one of them
        raise SandboxError(f"{name} has what no image of a sandbox has: features {features:#x}")
    return Header(size, below == 0)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a file that a VMM may have made. Raises `SandboxError` where it is none, `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SandboxError(f"{path.name} is not a file")
        yield descriptor
    finally:
        os.close(descriptor)


def header_of(path: Path) -> Header:
    """Raises `SandboxError`."""
    try:
        with opened(path) as descriptor:
            return read_header(descriptor, path.name)
    except OSError as error:
        raise SandboxError(f"{path.name}: {error.strerror}") from error


def nested(images: Sequence[Image]) -> str:
    """How `qemu-img` is told to open a chain, the lowest first."""
    node: dict[str, Any] | None = None
    for image in images:
        below = {"backing": node} if image.format == "qcow2" else {}
        node = {"driver": image.format, "file": {"driver": "file", "filename": str(image.path)}, **below}
    return f"json:{json.dumps(node)}"
