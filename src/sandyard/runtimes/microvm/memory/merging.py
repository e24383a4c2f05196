"""Deltas of a memory image made one: which of them, and how, so that at any moment there is a whole image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from sandyard.runtimes.deltas import Delta
from sandyard.runtimes.deltas.chain import merged_runs
from sandyard.runtimes.deltas.format import PARTIAL, write_runs
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit, pages_of, part
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.room import check_room

KEPT = 4
"""How many deltas may lie on each other before some become one: each is mapped, or read, at every start."""
_ABOVE = 3  # and how many above those that others share

Runs = Iterator[tuple[int, bytearray]]
Slow = Callable[[Runs, Path], Runs]
"""Passes on the runs that are to be written to a file."""


def lowest(sizes: Sequence[int], floor: int) -> int | None:
    """Of deltas of `sizes` bytes, the lowest first: which one, and all above it, are to become one; None where they
    are few. The `floor` lowest are left alone unless they are many themselves: others share them.

    A delta that is bigger than all above it stays, so that what is big is seldom written anew."""
    if floor > KEPT:
        floor = 0
    if len(sizes) <= max(KEPT, floor + _ABOVE):
        return None
    first = len(sizes) - 2
    total = sum(sizes[first:])
    while first > floor and (first > floor + 1 or sizes[first - 1] <= total):  # so that one or two are left
        first -= 1
        total += sizes[first]
    return first


def merge(name: Path, manifest: Manifest, first: int, *, durable: bool, slow: Slow | None = None) -> Manifest:
    """Write the deltas of an image from `first` as one beside them; the manifest that names it is left to be saved.

    Blocking. On failure nothing is left. Raises `Unfit` where they are not what was written, `OSError`."""
    what = f"pages{manifest.next_number}"
    made = part(name, what)
    with ExitStack() as stack:
        deltas = [stack.enter_context(Delta(path)) for path in pages_of(name, manifest)[first:]]
        for delta, digest in zip(deltas, manifest.pages[first:], strict=True):
            if delta.digest.hex() != digest:
                raise Unfit(f"{delta.path} is not what was written, but another one")
        runs: Runs = merged_runs(deltas)
        if slow is not None:
            runs = slow(runs, part(name, what + PARTIAL))
        write_runs(made, runs, block_size=PAGE, size=manifest.ram_bytes, parent=what, durable=durable)
    try:
        with Delta(made) as delta:
            return manifest.topped(first, delta.digest.hex())
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def compact(name: Path, floor: int, slow: Slow | None = None) -> Manifest | None:
    """Make an image that has many deltas have few; its manifest then, None where it had. Whoever reads it meanwhile,
    and wherever this is killed, there is the old one or the new one, of the same content; and where somebody removes
    it, there is none.

    Blocking. Raises `SandboxError`, `OSError`, with the old one."""
    manifest = image.load(name)
    paths = pages_of(name, manifest)
    _sweep(name, paths)
    sizes = [path.stat().st_size for path in paths]
    first = lowest(sizes, floor)
    if first is None:
        return None
    check_room(name.parent, sum(sizes[first:]), " of pages as one")  # an image is whole without it
    later = merge(name, manifest, first, durable=True, slow=slow)
    try:
        image.save_again(name, later)
    except BaseException:
        _forget_new(name, later)
        raise
    for path in paths[first:]:
        path.unlink(missing_ok=True)
    if not image.exists(name):
        _forget_new(name, later)
    return later


def _forget_new(name: Path, later: Manifest) -> None:
    """Unless it is the one that is there: then the image is whole with it."""
    if not image.exists(name) or image.load(name) != later:
        pages_of(name, later)[-1].unlink(missing_ok=True)


def _sweep(name: Path, paths: Sequence[Path]) -> None:
    """Remove what one that was killed left."""
    for path in name.parent.glob(f"{name.name}.pages*"):
        if path not in paths:
            path.unlink(missing_ok=True)
