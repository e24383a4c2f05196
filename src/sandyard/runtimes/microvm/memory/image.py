"""A guest's memory on the host's disk: what a copy of it is started from.

It belongs to a layer (or whatever has its name) and lies beside it: `NAME.ram` is the RAM of the guest that booted,
`NAME.pages0` and so on what was changed above it, the lowest first, `NAME.state` the devices, `NAME.base` the block
image of the template, `NAME.memory` the manifest, written last, also after the layer itself. RAM, pages and block
image are shared with the image that this one was made above, as further names of the same files: so images do not
need each other, nor a template that is as it was, and copies of both share the host's cache.

So it is with the disk: the layer itself is the uppermost of its images, `NAME.disk0` and so on lie below, the lowest
first, and `NAME.blank` below all, unless the lowest stands for itself.

The manifest says which pages there are. Several may become one at any time, which then has a name that none had
before: what reads an image by an earlier manifest finds all that this names, or misses one and reads anew (`settled`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from sandyard.errors import SandboxError
from sandyard.runtimes.durable import sync
from sandyard.runtimes.exchange import put_in_place
from sandyard.runtimes.microvm.qcow2 import header_of

FORMAT = 3
_FORMATS = (2, FORMAT)
"""What can be read. Before 3 it was not said which protocol the agent speaks: it was the first."""
_WHATS = ("ram", "base", "state")
_WORDS = {
    "accel": "accelerator",
    "machine": "machine type",
    "cpu": "CPU model",
    "engine": "QEMU",
    "vcpus": "number of CPUs",
    "memory_mb": "memory in MiB",
    "disk_mb": "disk in MiB",
    "network": "network interface",
    "image": "block image of the template",
    "layers": "set of layers below",
    "protocol": "protocol of the agent",
}


_Result = TypeVar("_Result")


class Unfit(SandboxError):
    """No guest can be started from this memory here: it is damaged, or of another host or sandbox."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What a guest was made on. All but its kernel must be the same for it to go on: that, and the agent, are in its
    memory, and what boots from now on is another matter."""

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
    protocol: int = 1  # that the agent speaks

    def check(self, here: Fit, what: Path) -> None:
        """Raises `Unfit` naming the first thing that is otherwise `here`."""
        for name, word in _WORDS.items():
            theirs, ours = getattr(self, name), getattr(here, name)
            if theirs != ours:
                raise Unfit(f"the memory of {what.name} was taken with another {word}: {theirs}, here it is {ours}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """`ram`: digests of its chunks of 1 MiB that have data, by number; `pages`: those of the deltas' footers; `disks`:
    those of the disk's images, the lowest first, of which the last is the layer; none for a suspended sandbox, whose
    disk is its own; `blank`: that of what lies below them, if anything does; `numbers`: those in the names of the
    deltas, ascending; where there are none, 0 and so on."""

    fit: Fit
    hostname: str
    conf_bytes: int  # of the disk with its first configuration
    state: str
    ram: Mapping[str, str]
    pages: Sequence[str]
    disks: Sequence[str] = ()
    blank: str = ""
    numbers: Sequence[int] = field(default_factory=list)

    @property
    def ram_bytes(self) -> int:
        return self.fit.memory_mb << 20

    @property
    def names(self) -> Sequence[str]:
        """Of the deltas, behind that of the image."""
        return [f"pages{number}" for number in self.numbers or range(len(self.pages))]

    @property
    def next_number(self) -> int:
        """Of the name of a delta that is to come."""
        return self.numbers[-1] + 1 if self.numbers else len(self.pages)

    def topped(self, first: int, digest: str) -> Manifest:
        """With one delta, that of `next_number`, in place of those from `first`, or above them all."""
        numbers = [*(self.numbers or range(len(self.pages)))][:first]
        return replace(self, pages=[*self.pages[:first], digest], numbers=[*numbers, self.next_number])


def part(name: Path, what: str) -> Path:
    return name.with_name(f"{name.name}.{what}")


def pages_of(name: Path, manifest: Manifest) -> Sequence[Path]:
    return [part(name, what) for what in manifest.names]


def disks_of(name: Path, count: int, *, blank: bool) -> Sequence[Path]:
    """The files of a disk of `count` images, the lowest first."""
    below = [part(name, f"disk{number}") for number in range(count - 1)]
    return [*([part(name, "blank")] if blank else []), *below, *([name] if count else [])]


def parts_of(name: Path, manifest: Manifest) -> Sequence[Path]:
    """All that it consists of, but for the manifest."""
    disks = disks_of(name, len(manifest.disks), blank=bool(manifest.blank))
    return [*(part(name, what) for what in _WHATS), *pages_of(name, manifest), *disks]


def chain_of(layer: Path) -> Sequence[Path]:
    """The files of a committed layer's disk, the lowest first, also where its memory is of another version. Raises
    `SandboxError` where it is not whole."""
    try:
        record = json.loads(part(layer, "memory").read_bytes().partition(b"\n")[2])
        count, blank = len(record.get("disks", ())) or 1, bool(record.get("blank"))
    except FileNotFoundError:
        count, blank = 1, False
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise Unfit(f"{part(layer, 'memory')} cannot be read: {error}") from error
    found = disks_of(layer, count, blank=blank)
    for path in found:
        if not path.is_file():
            raise Unfit(f"the disk of {layer.name} is not whole: {path.name} is gone")
        if not is_blank(path, layer):
            header_of(path)
    return found


def is_chain(layer: Path) -> bool:
    """Whether its disk is more than the one file."""
    return any(part(layer, what).exists() for what in ("blank", "disk0"))


def is_blank(path: Path, layer: Path) -> bool:
    return path == part(layer, "blank")


def exists(name: Path) -> bool:
    return part(name, "memory").is_file()


def save(name: Path, manifest: Manifest, *, durable: bool) -> None:
    """Write the manifest; all else is there. Raises `OSError`."""
    os.replace(_write(name, manifest, durable), part(name, "memory"))
    if durable:
        sync(name.parent)


def save_again(name: Path, manifest: Manifest) -> None:
    """Put another manifest in the place of the one there is. Raises `FileNotFoundError` where somebody removed that:
    the image is gone, and stays so; `OSError`."""
    try:
        put_in_place(_write(name, manifest, True), part(name, "memory"))
    finally:
        part(name, "memory.part").unlink(missing_ok=True)
    sync(name.parent)


def _write(name: Path, manifest: Manifest, durable: bool) -> Path:
    content = json.dumps({"format": FORMAT, **asdict(manifest)}, separators=(",", ":")).encode()
    scratch = part(name, "memory.part")
    with open(scratch, "wb") as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    return scratch


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
    if record.pop("format") not in _FORMATS:
        raise Unfit(f"{path} is of another version of Sandyard")
    return Manifest(**{**record, "fit": Fit(**record["fit"])})


def settled(name: Path, work: Callable[[Manifest], _Result]) -> _Result:
    """What `work` gives for the manifest; where it fails with what is not there any more, once more for the manifest
    that took its place meanwhile. Raises what it raises."""
    manifest = load(name)
    while True:
        try:
            return work(manifest)
        except (Unfit, FileNotFoundError):
            later = load(name)
            if later == manifest:
                raise
            manifest = later


def share(source: Path, target: Path, *, whats: Sequence[str] = _WHATS) -> Manifest:
    """Give the pages of `source`, and `whats`, the names of `target` too, whose manifest is left to be saved; what that
    says of them. Raises `Unfit`, `OSError`, with nothing shared."""

    def link(manifest: Manifest) -> Manifest:
        done: list[Path] = []
        try:
            for what in (*whats, *manifest.names):
                os.link(part(source, what), part(target, what))
                done.append(part(target, what))
        except BaseException:
            for path in done:
                path.unlink(missing_ok=True)
            raise
        return manifest

    return settled(source, link)


def remove(name: Path) -> None:
    """The manifest first: what is half is none. Idempotent. Raises `OSError`."""
    part(name, "memory").unlink(missing_ok=True)
    for path in name.parent.glob(f"{name.name}.*"):
        path.unlink(missing_ok=True)


def newest(home: Path) -> int:
    """The highest number that an image in `home`, the directory of a sandbox's own, has, or what is left of one; -1
    where there is none."""
    return max(map(int, _own(home)), default=-1)


def keep_only(home: Path, name: str) -> None:
    """Remove a sandbox's own images but `name`. Raises `OSError`."""
    for other in _own(home) - {name}:
        remove(home / other)


def _own(home: Path) -> set[str]:
    """The names, which are numbers, of a sandbox's own images, also of what is left of one."""
    return {path.name.partition(".")[0] for path in home.iterdir() if path.name[0].isdigit()}


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
    """Bytes on the host's disk of the layer and what lies beside it, as far as no other image shares it. Memory has
    no more than `names` names then, where so many are this one's and its source's that is not counted itself; images
    of the disk have two, while their sandbox is there."""
    found = 0
    for path in (name, *name.parent.glob(f"{name.name}.*")):
        with suppress(FileNotFoundError):  # it was compacted just now
            stat, own = path.stat(), path == name
            if own or stat.st_nlink <= (max(names, 2) if path.suffix.startswith(".disk") else names):
                found += stat.st_blocks * 512
    return found
