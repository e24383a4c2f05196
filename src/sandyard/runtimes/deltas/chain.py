"""An image that is kept as a base and the deltas above it: read as one, made into one, made shorter."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from sandyard.runtimes.deltas.extents import copy, extents
from sandyard.runtimes.deltas.format import PARTIAL, RUN_BYTES, Delta, DeltaDamaged, Run


class Piece(NamedTuple):
    """Blocks `first` to `end`, exclusive, as `run` of `delta` has them."""

    first: int
    end: int
    delta: Delta
    run: Run


def overlay(deltas: Sequence[Delta]) -> Sequence[Piece]:
    """Which blocks are whose, by number, where the later delta hides the earlier one's."""
    pieces: list[Piece] = []
    for delta in deltas:
        pieces = _hidden_by(pieces, delta)
    return pieces


def _hidden_by(below: Sequence[Piece], delta: Delta) -> list[Piece]:
    result: list[Piece] = []
    waiting = list(reversed(below))
    for run in delta.runs:
        while waiting and waiting[-1].first < run.end:
            piece = waiting.pop()
            if piece.end <= run.first:
                result.append(piece)
                continue
            if piece.first < run.first:
                result.append(Piece(piece.first, run.first, piece.delta, piece.run))
            if piece.end > run.end:
                waiting.append(Piece(run.end, piece.end, piece.delta, piece.run))
        result.append(Piece(run.first, run.end, delta, run))
    return result + waiting[::-1]


class Chain:
    """The image that `deltas`, the lowest first, make of the file `base`. Reading checks the deltas' digests, unless
    it is not to be `checked`: then it costs no more than what is read. `pieces`: what is not the base's, by number.

    Not for several threads at once."""

    def __init__(self, base: Path, deltas: Sequence[Path], *, checked: bool = True) -> None:
        """Raises `DeltaDamaged` where the deltas are not of one image, and `OSError`."""
        self._deltas: list[Delta] = []
        self._file = FileIO(base)
        try:
            for path in deltas:
                self._deltas.append(Delta(path))
            self._check()
        except BaseException:
            self.close()
            raise
        self.pieces = overlay(self._deltas)
        self._starts = [piece.first for piece in self.pieces]
        self._checked = checked
        self._kept: dict[Delta, tuple[Run, bytes]] = {}

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for delta in self._deltas:
            delta.close()
        self._file.close()

    @property
    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def data(self) -> Iterator[tuple[int, int]]:
        """Begin and end, in bytes, of every piece that may have data. Pieces may overlap; those of the base first."""
        yield from extents(self._file.fileno())
        for piece in self.pieces:
            size = piece.delta.block_size
            yield piece.first * size, min(piece.end * size, self.size)

    def read(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the image's bytes from `offset`, zeros behind its end. Raises `DeltaDamaged`."""
        got = os.preadv(self._file.fileno(), [target], offset)
        while 0 < got < len(target) and (more := os.preadv(self._file.fileno(), [target[got:]], offset + got)):
            got += more
        target[got:] = bytes(len(target) - got)
        if not self.pieces:
            return
        block = self._deltas[0].block_size
        first, end = offset // block, -(-(offset + len(target)) // block)
        at = max(0, bisect_right(self._starts, first) - 1)
        while at < len(self.pieces) and self.pieces[at].first < end:
            self._lay(self.pieces[at], offset, target, block)
            at += 1

    def _lay(self, piece: Piece, offset: int, target: memoryview, block: int) -> None:
        begin = max(piece.first * block, offset)
        end = min(piece.end * block, offset + len(target))
        if begin < end:
            first, data = begin // block, b""
            if self._checked:
                first, data = piece.run.first, _run(piece, self._kept)
            else:
                data = piece.delta.peek(piece.run, first, -(-end // block))
            skip = begin - first * block
            target[begin - offset : end - offset] = memoryview(data)[skip : skip + end - begin]

    def _check(self) -> None:
        for delta in self._deltas:
            if delta.size != self.size or delta.block_size != self._deltas[0].block_size:
                raise DeltaDamaged(f"{delta.path} is not of this image: its size or its blocks are others")


def _run(piece: Piece, kept: dict[Delta, tuple[Run, bytes]]) -> bytes:
    """The run of a piece. Several pieces are of one run, and deltas take turns: of each the last one is `kept`."""
    if piece.delta not in kept or kept[piece.delta][0] is not piece.run:
        kept[piece.delta] = (piece.run, piece.delta.read(piece.run))
    return kept[piece.delta][1]


def materialise(base: Path, deltas: Sequence[Path], target: Path, *, reserve: int = 0) -> None:
    """Write the image that a chain stands for as the new file `target`. Atomic, and readable by its owner only.

    Raises `DeltaDamaged`, `OSError`, and `SandboxError` where less than `reserve` bytes would stay free."""
    partial = target.with_name(target.name + PARTIAL)
    try:
        with Chain(base, deltas) as chain:
            copy(base, partial, 0o600, reserve=reserve)
            with open(partial, "r+b", buffering=0) as file:
                for piece in chain.pieces:
                    _apply(piece, file.fileno(), chain.size)
                os.fchmod(file.fileno(), 0o400)
        os.link(partial, target)  # unlike a rename, it does not replace
    finally:
        partial.unlink(missing_ok=True)


def _apply(piece: Piece, descriptor: int, size: int) -> None:
    block = piece.delta.block_size
    skip = (piece.first - piece.run.first) * block
    begin, end = piece.first * block, min(piece.end * block, size)
    data = memoryview(piece.delta.read(piece.run))[skip : skip + end - begin]
    while data:
        done = os.pwrite(descriptor, data, begin)
        data, begin = data[done:], begin + done


def merged(deltas: Sequence[Delta]) -> Iterator[tuple[int, memoryview]]:
    """The blocks of several deltas, the lowest first, as those of one. Raises `DeltaDamaged`."""
    for first, data in merged_runs(deltas):
        size = deltas[0].block_size
        for at in range(0, len(data), size):
            yield first + at // size, memoryview(data)[at : at + size]


def merged_runs(deltas: Sequence[Delta]) -> Iterator[tuple[int, bytearray]]:
    """`merged` as runs, for `write_runs`: the number of the first block of each, and its bytes. Raises
    `DeltaDamaged`."""
    kept: dict[Delta, tuple[Run, bytes]] = {}
    first, kind, pending = 0, False, bytearray()
    for piece in overlay(deltas):
        size, is_zero = piece.delta.block_size, piece.run.offset is None
        if pending and (piece.first != first + len(pending) // size or is_zero != kind):
            yield first, pending
            pending = bytearray()
        if not pending:
            first, kind = piece.first, is_zero
        skip = (piece.first - piece.run.first) * size
        pending += memoryview(_run(piece, kept))[skip : skip + (piece.end - piece.first) * size]
        if len(pending) >= RUN_BYTES:
            yield first, pending[:RUN_BYTES]
            first, pending = first + RUN_BYTES // size, pending[RUN_BYTES:]
    if pending:
        yield first, pending
