"""Which blocks of an image differ from those of an earlier one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sandyard.runtimes.deltas.chain import Chain
from sandyard.runtimes.deltas.extents import extents

_WINDOW = 1 << 20


def differing(image: Path, parent: Chain, block_size: int = 4096) -> Iterator[tuple[int, memoryview]]:
    """The blocks of `image` that are not as in `parent`, ascending; each is valid until the next is asked for.

    Where both have holes nothing is read. `block_size` divides 1 MiB. Raises `DeltaDamaged`, `OSError`."""
    ours, theirs = bytearray(_WINDOW), bytearray(_WINDOW)
    mine, other = memoryview(ours), memoryview(theirs)
    with open(image, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for window in _windows(file.fileno(), parent):
            start = window * _WINDOW
            length = min(_WINDOW, size - start)
            got = os.preadv(file.fileno(), [mine[:length]], start)
            if got != length:
                raise OSError(f"{image} ended at {start + got} of {size} bytes")
            mine[length:] = bytes(_WINDOW - length)
            parent.read(start, other)
            if ours == theirs:
                continue
            for at in range(0, length, block_size):
                if ours[at : at + block_size] != theirs[at : at + block_size]:
                    yield (start + at) // block_size, mine[at : at + block_size]


def _windows(descriptor: int, parent: Chain) -> list[int]:
    """The windows in which one of the two has data."""
    found: set[int] = set()
    for pieces in (extents(descriptor), parent.data()):
        for begin, end in pieces:
            found.update(range(begin // _WINDOW, -(-end // _WINDOW)))
    return sorted(found)
