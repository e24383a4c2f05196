"""Layers that nobody wants, but that another is kept as the difference to: what it needs of them becomes its own."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

from sandyard.runtimes.container.derived import (
    MERGED,
    SUFFIX,
    LayerGone,
    ancestry,
    delta_of,
    locked,
    make,
)
from sandyard.runtimes.container.increment import BLOCK
from sandyard.runtimes.deltas import Delta, merged, write_delta
from sandyard.runtimes.deltas.chain import overlay
from sandyard.runtimes.durable import sync

_WORTH = 4  # it is to free a quarter of what it writes, else every deletion would write all of it anew


def merge(layer: Path, spare: Collection[Path]) -> bool:
    """Have `layer` need none, or fewer, of those below it that are `spare`: needed by it only. False where it is in
    use, or too little would be freed. At any moment there is the old state or the new one, of the same content.

    Blocking. Raises `SandboxError`, `OSError`, with the old state."""
    with locked(layer, wait=False) as is_delta:
        if not is_delta:
            return False
        try:
            root, above = ancestry(layer)
        except LayerGone:
            return False  # who starts from it is told
        first = len(above) - 1
        while first > 0 and above[first - 1] in spare:
            first -= 1
        with ExitStack() as stack:
            deltas = [stack.enter_context(Delta(delta_of(each))) for each in above[first:]]
            kept = sum(delta.data_bytes for delta in deltas)
            union = _union(deltas)
            if first == 0 and root in spare and union > root.stat().st_blocks * 512 // 2:
                return _make_whole(layer)
            if len(deltas) < 2 or (kept - union) * _WORTH < union:
                return False
            return _unite(layer, deltas)


def _union(deltas: Sequence[Delta]) -> int:
    """Bytes of data of several deltas as one."""
    return sum((p.end - p.first) * p.delta.block_size for p in overlay(deltas) if p.run.offset is not None)


def _unite(layer: Path, deltas: Sequence[Delta]) -> bool:
    united, top = layer.with_name(layer.name + SUFFIX + MERGED), deltas[-1]
    united.unlink(missing_ok=True)  # of a process that was killed
    write_delta(united, merged(deltas), block_size=BLOCK, size=top.size, parent=deltas[0].parent, durable=True)
    try:
        os.rename(united, delta_of(layer))
        sync(layer.parent)
    finally:
        united.unlink(missing_ok=True)
    return True


def _make_whole(layer: Path) -> bool:
    make(layer, durable=True)
    delta_of(layer).unlink()
    sync(layer.parent)
    return True
