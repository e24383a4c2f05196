"""A layer of this node as pieces to be sent: what it has, window by window."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from sandyard.runtimes.deltas import Delta
from sandyard.runtimes.deltas.extents import extents
from sandyard.sandboxes.remote.manifest import Kind
from sandyard.sandboxes.remote.packing import pack
from sandyard.store.blobs import BlobError

Piece = tuple[int, bytes]
Needs = Callable[[Path], Path | None]
DELTA = ".delta"


class LayerGone(BlobError):
    """A layer is not on this node, or not any more: differences may be merged at any time."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open layer. `parent`: the one it is kept as the difference to. `expected`: about how many bytes come;
    0 where nobody knows."""

    kind: Kind
    name: str
    size: int
    parent: Path | None
    expected: int
    pieces: Iterator[Piece]


def present(layer: Path) -> bool:
    """Whether a layer of that name is on this node, whole or as a difference."""
    return os.path.lexists(layer) or layer.with_name(layer.name + DELTA).is_file()


def stored_in(layer: Path) -> Path:
    """The file or directory that a layer is kept in."""
    delta = layer.with_name(layer.name + DELTA)
    return delta if delta.is_file() else layer


@contextmanager
def opened(layer: Path, chunk: int, uid_base: int, needs: Needs) -> Iterator[Source]:
    """`needs` is `Runtime.needs`. Blocking, as is every step through `pieces`. What it gives is one state of the layer,
    also where it is merged with those below meanwhile. Raises `LayerGone`, `SandboxError` for a damaged one."""
    try:
        if layer.is_dir():
            yield Source("tree", "", 0, None, 0, _cut(pack(layer, uid_base), chunk))
            return
        path = stored_in(layer)
        kind: Kind = "file" if path == layer else "delta"
        with FileIO(path) as file:
            found, parent = os.fstat(file.fileno()), needs(layer)
            if not os.path.samestat(found, path.stat()) or stored_in(layer) != path:
                raise LayerGone(f"layer {layer} was merged right now", remedy="try again")
            if kind == "delta":
                with Delta(Path(f"/proc/self/fd/{file.fileno()}")) as whole:
                    whole.verify()
            expected = sum(end - begin for begin, end in extents(file.fileno()))
            pieces = _windows(file, found.st_size, chunk)
            yield Source(kind, layer.name, found.st_size, parent, expected, pieces)
    except FileNotFoundError as error:
        raise LayerGone(f"layer {layer} is gone: {error.filename}") from error


def _windows(file: FileIO, size: int, chunk: int) -> Iterator[Piece]:
    """What is not zero, at multiples of `chunk`."""
    done = 0
    for begin, end in extents(file.fileno()):
        for start in range(max(begin // chunk * chunk, done), end, chunk):
            data = os.pread(file.fileno(), min(chunk, size - start), start)
            while len(data) < min(chunk, size - start):
                more = os.pread(file.fileno(), min(chunk, size - start) - len(data), start + len(data))
                if not more:
                    raise BlobError(f"{file.name!r} ended at {start + len(data)} of {size} bytes")
                data += more
            done = start + chunk
            if data != bytes(len(data)):
                yield start, data


def _cut(stream: Iterator[bytes], chunk: int) -> Iterator[Piece]:
    offset, held = 0, bytearray()
    for data in stream:
        held += data
        while len(held) >= chunk:
            yield offset, bytes(held[:chunk])
            offset += chunk
            del held[:chunk]
    if held:
        yield offset, bytes(held)
