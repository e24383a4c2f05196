"""A layer that is kept as what changed since an earlier one of the same disk.

`<layer>.delta` holds the blocks that differ from its parent's, a layer beside it; `<layer>` itself, the image that
both make, is written when a sandbox first starts from it and may be removed whenever none does.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas import Chain, Delta, differing, materialise, merged, write_delta
from sandyard.runtimes.deltas.format import PARTIAL, Block
from sandyard.runtimes.durable import sync

MAX_DEPTH = 8
"""How many deltas may lie on each other: each is read to make the image."""
_BLOCK = 4096
_KEPT_SECONDS = 600.0
_SUFFIX = ".delta"
_DRAFTS = (".delta.1", ".delta.2")

StandStill = Callable[[], AbstractContextManager[None]]


class TooMuch(Exception):
    """So much changed that a whole image is the better layer."""


def delta_of(layer: Path) -> Path:
    """Where a layer's delta is, if it has one."""
    return layer.with_name(layer.name + _SUFFIX)


def parent_of(layer: Path) -> Path | None:
    """The layer that this one needs; None for a whole image. Raises `SandboxError` for a damaged delta."""
    if not delta_of(layer).exists():
        return None
    with Delta(delta_of(layer)) as delta:
        return layer.with_name(delta.parent)


def exists(layer: Path) -> bool:
    """Whether a sandbox can start from it."""
    return layer.is_dir() or layer.is_file() or delta_of(layer).is_file()


def commit_increment(
    image: Path, target: Path, parent: Path, stand_still: StandStill | None, written: Callable[[], int], durable: bool
) -> int:
    """Write what differs between `image` and the layer `parent` as the delta of `target`; returns its bytes on disk.

    `written` makes the kernel write all that it holds of the image, and returns a number that grows with what was
    ever written to it. A chain that would be deeper than `MAX_DEPTH` begins anew on its root. Blocking. Raises
    `TooMuch`, `SandboxError`, `OSError`; nothing is left then."""
    root, deltas = _chain(parent)
    if len(deltas) >= MAX_DEPTH:
        parent, deltas = root, []
    final, (first, second) = delta_of(target), [target.with_name(target.name + suffix) for suffix in _DRAFTS]
    size, limit = image.stat().st_size, image.stat().st_blocks * 512 // 2

    def write(path: Path, below: Sequence[Path], named: str) -> None:
        with Chain(root, below) as chain:
            blocks = _bounded(differing(image, chain, _BLOCK), limit)
            write_delta(path, blocks, block_size=_BLOCK, size=size, parent=named, durable=False)

    _sweep(target)  # of a process that was killed
    try:
        before = written()
        write(first, deltas, parent.name)  # while it still runs: often it writes nothing meanwhile, and this was all
        if stand_still is not None:
            with stand_still():
                if written() != before:
                    write(second, [*deltas, first], first.name)
        _finish(final, [path for path in (first, second) if path.exists()], size, parent.name, durable)
        return final.stat().st_blocks * 512
    finally:
        _sweep(target)


def ready(layers: Sequence[Path]) -> None:
    """See to it that each of these layers is there as a whole. Blocking; several may do it at once, also other
    processes. Raises `SandboxError` naming what is damaged or gone, `OSError`."""
    for layer in layers:
        if delta_of(layer).exists():
            _make(layer)
            os.utime(layer)  # it is wanted


def _make(layer: Path) -> None:
    with open(delta_of(layer), "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if layer.exists():  # another was quicker
            return
        layer.with_name(layer.name + PARTIAL).unlink(missing_ok=True)  # of a process that was killed
        root, deltas = _chain(layer)
        try:
            materialise(root, deltas, layer)
        except FileNotFoundError as error:
            raise SandboxError(f"layer {layer} needs {error.filename}, which is gone") from error


def _chain(layer: Path) -> tuple[Path, list[Path]]:
    """The image at the root of a layer, and the deltas above it, the lowest first."""
    deltas: list[Path] = []
    while (parent := parent_of(layer)) is not None:
        deltas.insert(0, delta_of(layer))
        layer = parent
        if len(deltas) > MAX_DEPTH:
            raise SandboxError(f"more than {MAX_DEPTH} deltas above {layer}")
    if not layer.is_file():
        raise SandboxError(f"layer {layer} is gone, and others are kept as what differs from it")
    return layer, deltas


def _bounded(blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    taken = 0
    for number, data in blocks:
        taken += len(data)
        if taken > limit:
            raise TooMuch
        yield number, data


def _sweep(target: Path) -> None:
    """Remove the drafts of a layer."""
    for suffix in (*_DRAFTS, _SUFFIX):
        target.with_name(target.name + suffix + PARTIAL).unlink(missing_ok=True)
        if suffix != _SUFFIX:
            target.with_name(target.name + suffix).unlink(missing_ok=True)


def _finish(final: Path, drafts: Sequence[Path], size: int, parent: str, durable: bool) -> None:
    """Make one delta of the drafts under its final name."""
    if len(drafts) == 1:  # it is that one already
        if durable:
            sync(drafts[0])
        os.link(drafts[0], final)
        if durable:
            sync(final.parent)
        return
    with ExitStack() as stack:
        opened = [stack.enter_context(Delta(path)) for path in drafts]
        write_delta(final, merged(opened), block_size=_BLOCK, size=size, parent=parent, durable=durable)


def forget(layer: Path) -> bool:
    """Remove the image of a layer that has a delta to make it from, if nobody wanted it lately."""
    if delta_of(layer).is_file():
        with suppress(FileNotFoundError):
            if time.time() - layer.stat().st_mtime > _KEPT_SECONDS:
                layer.unlink()
                return True
    return False
