"""The RAM of a running VMM as the host sees it: which pages a guest changed, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas import Placed
from sandyard.runtimes.deltas.extents import extents
from sandyard.runtimes.microvm.memory.pagemap import PAGE, Span, own_pages

BACKEND = "memfd:memory-backend-memfd"  # as QEMU names the file it makes
_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """Where a VMM has the RAM of its guest."""

    pid: int
    start: int
    size: int


def find_region(pid: int, size: int) -> Region:
    """Raises `SandboxError` where the process has no such memory."""
    try:
        with open(f"/proc/{pid}/maps") as maps:
            for line in maps:
                begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
                if BACKEND in line and end - begin == size:
                    return Region(pid, begin, size)
    except OSError as error:
        raise SandboxError(f"memory of the VMM {pid}: {error.strerror}") from error
    raise SandboxError(f"the VMM {pid} has no memory of {size} bytes")


def changed(region: Region) -> Sequence[Span]:
    """The pages that are the process's own: a guest wrote to them since their file was mapped. Raises `OSError`."""
    return own_pages(region.pid, region.start, region.size)


def copy_out(region: Region, spans: Sequence[Span], draft: Path) -> None:
    """Write these pages to the new file `draft`, one behind the other. Raises `OSError`."""
    with open(f"/proc/{region.pid}/mem", "rb", buffering=0) as memory, open(draft, "xb", buffering=0) as file:
        for first, end in spans:
            for at in range(first * PAGE, end * PAGE, _WINDOW):
                data = os.pread(memory.fileno(), min(_WINDOW, end * PAGE - at), region.start + at)
                if not data or len(data) % PAGE or file.write(data) != len(data):
                    raise OSError(f"the memory of the VMM {region.pid} could not be copied")


def drafted(draft: Path, spans: Sequence[Span]) -> Iterator[tuple[Span, Placed]]:
    """The pages that `copy_out` wrote, ascending, at most a MiB at a time, and the span of each. Raises `OSError`."""
    with open(draft, "rb", buffering=0) as file:
        offset = 0
        for span in spans:
            for at in range(span[0], span[1], _WINDOW // PAGE):
                length = min(_WINDOW // PAGE, span[1] - at) * PAGE
                data = file.read(length)
                if len(data) != length:
                    raise OSError(f"{draft} ended early")
                yield span, Placed(at, offset, data)
                offset += length


def copy_whole(region: Region, target: Path) -> None:
    """Write the RAM of a guest that booted to the new file `target`, whose holes are zeros. Raises `OSError`."""
    with open(_backend(region.pid), "rb", buffering=0) as memory, open(target, "xb", buffering=0) as file:
        os.ftruncate(file.fileno(), region.size)
        for begin, end in extents(memory.fileno()):
            for at in range(begin, end, _WINDOW):
                data = os.pread(memory.fileno(), min(_WINDOW, end - at), at)
                for first, length in _not_zero(data):
                    os.pwrite(file.fileno(), memoryview(data)[first : first + length], at + first)


def _not_zero(data: bytes) -> Iterator[tuple[int, int]]:
    """Where pages are not zero: offset and length."""
    if not data.strip(b"\0"):
        return
    zero, begin = bytes(PAGE), None
    for at in range(0, len(data), PAGE):
        if data[at : at + PAGE] == zero[: len(data) - at]:
            if begin is not None:
                yield begin, at - begin
            begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, len(data) - begin


def _backend(pid: int) -> str:
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        if BACKEND in os.readlink(path):
            return path
    raise OSError(f"the VMM {pid} has no file with its guest's memory")
