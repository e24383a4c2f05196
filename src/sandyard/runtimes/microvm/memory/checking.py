"""Whether an image of memory is what was written: digests of its files, taken when it is made and before it is used."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from sandyard.runtimes.deltas import Delta, DeltaDamaged
from sandyard.runtimes.deltas.extents import extents
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit, pages_of, part

_CHUNK = 1 << 20
_REMEMBERED = 4096
STATE_MAX = 64 << 20
"""Bytes of a device state: more is none."""


def digest_file(path: Path) -> str:
    """Raises `Unfit` for a state too big to be one, and `OSError`."""
    if path.stat().st_size > STATE_MAX:
        raise Unfit(f"{path}: a device state of {path.stat().st_size} bytes is none")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_ram(path: Path) -> dict[str, str]:
    """Of every chunk that has data. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        numbers: set[int] = set()
        for begin, end in extents(file.fileno()):
            numbers.update(range(begin // _CHUNK, -(-end // _CHUNK)))
        found = {}
        for number in sorted(numbers):
            data = os.pread(file.fileno(), _CHUNK, number * _CHUNK)
            found[str(number)] = hashlib.blake2b(data, digest_size=16).hexdigest()
        return found


def seal(name: Path, manifest: Manifest, *, durable: bool) -> Manifest:
    """Save the manifest of an image of which all is there, with the digest of its layer, which is all of its disk.
    Blocking. Raises `OSError`."""
    sealed = replace(manifest, disks=[disk.digest(name)], blank="")
    image.save(name, sealed, durable=durable)
    return sealed


class Checker:
    """Checks images against their manifests. A file that was whole is not read again while it stays as it is."""

    def __init__(self) -> None:
        self._whole: dict[tuple[int, int, int, int, str], None] = {}  # the last ones that were asked for come last

    def check(self, name: Path, manifest: Manifest) -> None:
        """Blocking. Raises `Unfit` naming what is not what was written."""
        try:
            for path, digest, check in _files(name, manifest):
                key = _key(path, digest)
                if key not in self._whole:
                    check(path)
                self._remember(key)
        except FileNotFoundError as error:
            raise Unfit(f"the memory of {name.name} is not whole: {error.filename} is gone") from error
        except OSError as error:
            raise Unfit(f"the memory of {name.name} cannot be read: {error}") from error

    def trust(self, name: Path, manifest: Manifest) -> None:
        """These files were written here just now: they need not be read. Blocking. Raises `OSError`."""
        for path, digest, _ in _files(name, manifest):
            self._remember(_key(path, digest))

    def trust_last(self, name: Path, manifest: Manifest) -> None:
        """`trust`, of the topmost pages only. Blocking. Raises `OSError`."""
        self._remember(_key(pages_of(name, manifest)[-1], manifest.pages[-1]))

    def _remember(self, key: tuple[int, int, int, int, str]) -> None:
        self._whole.pop(key, None)
        self._whole[key] = None
        while len(self._whole) > _REMEMBERED:
            self._whole.pop(next(iter(self._whole)))


def _key(path: Path, digest: str) -> tuple[int, int, int, int, str]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, digest


def _files(name: Path, manifest: Manifest) -> Iterator[tuple[Path, str, Callable[[Path], None]]]:
    """What an image consists of: each file, what stands for its content, and what checks it."""
    yield part(name, "state"), manifest.state, partial(_check_state, digest=manifest.state)
    ram = hashlib.sha256(json.dumps(dict(manifest.ram), sort_keys=True).encode()).hexdigest()
    yield part(name, "ram"), ram, partial(_check_ram, manifest=manifest)
    for path, digest in zip(pages_of(name, manifest), manifest.pages, strict=True):
        yield path, digest, partial(_check_pages, digest=digest, size=manifest.ram_bytes)
    disks = image.disks_of(name, len(manifest.disks), blank=bool(manifest.blank))
    for path, digest in zip(disks, [*([manifest.blank] if manifest.blank else []), *manifest.disks], strict=True):
        yield path, digest, partial(_check_disk, digest=digest)


def _check_state(path: Path, digest: str) -> None:
    if digest_file(path) != digest:
        raise Unfit(f"{path} is not what was written")


def _check_disk(path: Path, digest: str) -> None:
    if disk.digest(path) != digest:
        raise Unfit(f"{path}, of the disk that its memory goes with, is not what was written")


def _check_ram(path: Path, manifest: Manifest) -> None:
    if path.stat().st_size != manifest.ram_bytes:
        raise Unfit(f"{path} has {path.stat().st_size} of {manifest.ram_bytes} bytes")
    found = digest_ram(path)
    zero = hashlib.blake2b(bytes(_CHUNK), digest_size=16).hexdigest()
    for number in sorted({*found, *manifest.ram}, key=int):
        if found.get(number, zero) != manifest.ram.get(number, zero):
            raise Unfit(f"{path}: MiB {number} is not what was written")


def _check_pages(path: Path, digest: str, size: int) -> None:
    try:
        with Delta(path) as delta:
            if delta.digest.hex() != digest or delta.size != size:
                raise Unfit(f"{path} is not what was written, but another one")
            delta.verify()
    except DeltaDamaged as error:
        raise Unfit(error.message) from error
