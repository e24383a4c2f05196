"""Committing a disk as what changed since an earlier layer of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from sandyard.runtimes.container.derived import MAX_DEPTH, SUFFIX, ancestry, delta_of, open_chain
from sandyard.runtimes.deltas import Delta, differing, merged, write_delta
from sandyard.runtimes.deltas.format import PARTIAL, Block
from sandyard.runtimes.durable import sync

BLOCK = 4096
_DRAFTS = (".delta.1", ".delta.2")

StandStill = Callable[[], AbstractContextManager[None]]


class TooMuch(Exception):
    """So much changed that a whole image is the better layer."""


def commit_increment(
    image: Path, target: Path, parent: Path, stand_still: StandStill | None, written: Callable[[], int], durable: bool
) -> int:
    """Write what differs between `image` and the layer `parent` as the delta of `target`; returns its bytes on disk.

    `written` makes the kernel write all that it holds of the image, and returns a number that grows with what was
    ever written to it. A chain that would be deeper than `MAX_DEPTH` begins anew on its root. Every byte is compared,
    so that a `parent` of something else costs space and nothing more. Blocking. Raises `TooMuch`, `LayerGone`,
    `SandboxError`, `OSError`; nothing is left then."""
    root, above = ancestry(parent)
    if len(above) >= MAX_DEPTH:
        parent, above = root, []
    final, (first, second) = delta_of(target), [target.with_name(target.name + suffix) for suffix in _DRAFTS]
    size, limit = image.stat().st_size, image.stat().st_blocks * 512 // 2

    def write(path: Path, drafts: Sequence[Path], named: str) -> None:
        with open_chain(root, above, drafts) as chain:
            if chain.size != size:
                raise TooMuch
            blocks = _bounded(differing(image, chain, BLOCK), limit)
            write_delta(path, blocks, block_size=BLOCK, size=size, parent=named, durable=False)

    _sweep(target)  # of a process that was killed
    try:
        before = written()
        write(first, (), parent.name)  # while it still runs: often it writes nothing meanwhile, and this was all
        if stand_still is not None:
            with stand_still():
                if written() != before:
                    write(second, [first], first.name)
        _finish(final, [path for path in (first, second) if path.exists()], size, parent.name, durable)
        return final.stat().st_blocks * 512
    finally:
        _sweep(target)


def _bounded(blocks: Iterator[Block], limit: int) -> Iterator[Block]:
    taken = 0
    for number, data in blocks:
        taken += len(data)
        if taken > limit:
            raise TooMuch
        yield number, data


def _sweep(target: Path) -> None:
    """Remove the drafts of a layer."""
    for suffix in (*_DRAFTS, SUFFIX):
        target.with_name(target.name + suffix + PARTIAL).unlink(missing_ok=True)
        if suffix != SUFFIX:
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
        write_delta(final, merged(opened), block_size=BLOCK, size=size, parent=parent, durable=durable)
