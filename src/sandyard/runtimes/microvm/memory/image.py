"""A guest's memory on the host's disk: what a copy of it is started from.

It belongs to a layer (or whatever has its name) and lies beside it: `NAME.ram` is the RAM of the guest that booted,
`NAME.pages0` and so on what was changed above it, the lowest first, `NAME.state` the devices, `NAME.base` the block
image of the template, `NAME.memory` the manifest, written last, also after the layer itself. RAM, pages and block
image are shared with the image that this one was made above, as further names of the same files: so images do not
need each other, nor a template that is as it was, and copies of both share the host's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sandyard.errors import SandboxError
from sandyard.runtimes.durable import sync

FORMAT = 1
_WHATS = ("ram", "base", "state")
_WORDS = {
    "accel": "accelerator",
    "machine": "machine type",
    "cpu": "CPU model",
    "engine": "QEMU",
    "kernel": "guest kernel",
    "vcpus": "number of CPUs",
    "memory_mb": "memory in MiB",
    "disk_mb": "disk in MiB",
    "network": "network interface",
    "image": "block image of the template",
    "layers": "layers below",
}


class Unfit(SandboxError):
    """No guest can be started from this memory here: it is damaged, or of another host or sandbox."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What must be the same for a guest to go on."""

    accel: str
    machine: str
    cpu: str
    engine: str
    kernel: str
    vcpus: int
    memory_mb: int
    disk_mb: int
    network: bool
    image: str
    layers: Sequence[str]

    def check(self, here: Fit, what: Path) -> None:
        """Raises `Unfit` naming the first thing that is otherwise `here`."""
        for field in fields(self):
            theirs, ours = getattr(self, field.name), getattr(here, field.name)
            if theirs != ours:
                word = _WORDS[field.name]
                raise Unfit(f"the memory of {what.name} was taken with another {word}: {theirs}, here it is {ours}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """`ram`: digests of its chunks of 1 MiB that have data, by number; `pages`: those of the deltas' footers; `disk`:
    that of the layer; empty for a suspended sandbox, whose disk is its own, and in older manifests."""

    fit: Fit
    hostname: str
    conf_bytes: int  # of the disk with its first configuration
    state: str
    ram: Mapping[str, str]
    pages: Sequence[str]
    disk: str = ""

    @property
    def ram_bytes(self) -> int:
        return self.fit.memory_mb << 20

    def stands_on(self, below: Manifest) -> bool:
        """Whether `below` is this one's RAM with some of its pages."""
        return self.ram == below.ram and list(self.pages[: len(below.pages)]) == list(below.pages)


def part(name: Path, what: str) -> Path:
    return name.with_name(f"{name.name}.{what}")


def pages_of(name: Path, manifest: Manifest) -> Sequence[Path]:
    return [part(name, f"pages{number}") for number in range(len(manifest.pages))]


def parts_of(name: Path, manifest: Manifest) -> Sequence[Path]:
    """All that lies beside the layer, but for the manifest."""
    return [*(part(name, what) for what in _WHATS), *pages_of(name, manifest)]


def exists(name: Path) -> bool:
    return part(name, "memory").is_file()


def save(name: Path, manifest: Manifest, *, durable: bool) -> None:
    """Write the manifest; all else is there. Raises `OSError`."""
    content = json.dumps({"format": FORMAT, **asdict(manifest)}, separators=(",", ":")).encode()
    path, scratch = part(name, "memory"), part(name, "memory.part")
    with open(scratch, "wb") as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(scratch, path)
    if durable:
        sync(path.parent)


def load(name: Path) -> Manifest:
    """Raises `Unfit` where there is none, or where it is not what was written."""
    path = part(name, "memory")
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except FileNotFoundError as error:
        raise Unfit(f"{name.name} has no memory: it holds files only", remedy="start it without memory") from error
    except OSError as error:
        raise Unfit(f"{path}: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise Unfit(f"{path} is not what was written")
    record: dict[str, Any] = json.loads(content)
    if record.pop("format") != FORMAT:
        raise Unfit(f"{path} is of another version of Sandyard")
    return Manifest(**{**record, "fit": Fit(**record["fit"])})


def link(source: Path, manifest: Manifest, target: Path, *, whats: Sequence[str] = _WHATS) -> None:
    """Give the pages of `source`, and `whats`, the names of `target` too; its manifest is left to be saved.
    Raises `OSError`."""
    for what in (*whats, *(f"pages{number}" for number in range(len(manifest.pages)))):
        os.link(part(source, what), part(target, what))


def remove(name: Path) -> None:
    """The manifest first: what is half is none. Idempotent. Raises `OSError`."""
    part(name, "memory").unlink(missing_ok=True)
    for path in name.parent.glob(f"{name.name}.*"):
        path.unlink(missing_ok=True)


def newest(home: Path) -> int:
    """The highest number that an image in `home`, the directory of a sandbox's own, has, or what is left of one; -1
    where there is none."""
    return max((int(path.name.partition(".")[0]) for path in home.iterdir() if path.name[0].isdigit()), default=-1)


def keep_only(home: Path, name: str) -> None:
    """Remove a sandbox's own images but `name`. Raises `OSError`."""
    for other in {path.name.partition(".")[0] for path in home.iterdir() if path.name[0].isdigit()} - {name}:
        remove(home / other)


def check_new(name: Path) -> None:
    """Raises `SandboxError` where there is such a layer: it is not to get the memory of another."""
    if name.exists():
        raise SandboxError(f"commit to {name}: it is there already")


def remove_half(name: Path) -> None:
    """`remove`, and the layer too, unless there is the manifest: that comes last."""
    if not exists(name):
        remove(name)
        name.unlink(missing_ok=True)


def taken(name: Path, names: int = 1) -> int:
    """Bytes on the host's disk beside the layer, of files that have no more than `names` names: no other image
    shares those, where so many are this one's and its source's that is not counted itself."""
    stats = [path.stat() for path in name.parent.glob(f"{name.name}.*")]
    return sum(stat.st_blocks * 512 for stat in stats if stat.st_nlink <= names)
