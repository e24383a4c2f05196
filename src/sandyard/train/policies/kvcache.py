"""The key-value memory of a decode batch, and a store of finished prefixes.

One tensor holds every layer: `[2, layers, rows, heads, columns, dim]`, keys at 0 and values at 1. All
rows end at the same column, so that a step writes one column and reads one slice; a row of length n
occupies the n columns before `end`, without holes. Rows join and leave between steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch
from transformers import Cache

KV = torch.Tensor  # [2, layers, heads, length, dim]
_HEADROOM = 64


class BatchCache(Cache):  # type: ignore[misc]
    """The cache object a transformers decoder writes to while decoding one token of every row."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = 0
        self.end = 0
        self.starts: list[int] = []
        self._data: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data = self._buffer()[:, layer_idx, : self.rows, :, : self.end + 1]
        data[0, :, :, self.end] = key_states[:, :, 0]
        data[1, :, :, self.end] = value_states[:, :, 0]
        return data[0], data[1]

    def get_seq_length(self, layer_idx: int = 0, *args: object, **kwargs: object) -> int:
        return self.end

    def ensure_room(self) -> None:
        """Make sure the next step has a column to write to."""
        if self.end + 1 > self._buffer().shape[4]:
            self._relayout(self.rows, max(self.lengths()))

    def advance(self) -> None:
        """A step is done: the column it wrote belongs to the rows."""
        self.end += 1

    def lengths(self) -> list[int]:
        return [self.end - start for start in self.starts]

    def mask(self) -> torch.Tensor:
        """Additive attention mask of the next step, [rows, 1, 1, end + 1]."""
        assert self._mask is not None
        return self._mask[: self.rows, None, None, : self.end + 1]

    def add(self, items: Sequence[KV]) -> None:
        """Append rows."""
        longest = max(item.shape[3] for item in items)
        self._like(items[0])
        rows = self.rows + len(items)
        if longest > self.end or rows > self._buffer().shape[2]:
            self._relayout(rows, max([longest, *self.lengths()]))
        data = self._buffer()
        for row, item in enumerate(items, self.rows):
            self.starts.append(self.end - item.shape[3])
            data[:, :, row, :, self.starts[row] : self.end] = item
        self.rows = rows
        self._write_mask()

    def remove(self, gone: Sequence[int]) -> list[int]:
        """Drop rows; returns the old indices in their new order."""
        order = [row for row in range(self.rows) if row not in set(gone)]
        # Rows move from the tail into the holes, so that only as many are copied as left.
        kept = len(order)
        holes = [row for row in gone if row < kept]
        tail = [row for row in order if row >= kept]
        order = list(range(kept))
        if holes:
            data = self._buffer()
            data[:, :, holes, :, : self.end] = data[:, :, tail, :, : self.end]
            for hole, source in zip(holes, tail, strict=True):
                order[hole] = source
        self.starts = [self.starts[row] for row in order]
        self.rows = kept
        if kept == 0:
            self.end = 0
        elif min(self.starts) > max(_HEADROOM, self.end // 2):
            self._relayout(kept, max(self.lengths()))
        self._write_mask()
        return order

    def row(self, index: int) -> KV:
        """A copy of one row."""
        return self._buffer()[:, :, index, :, self.starts[index] : self.end].clone()

    def clear(self) -> None:
        self.rows, self.end, self.starts, self._data, self._mask = 0, 0, [], None, None

    def _buffer(self) -> torch.Tensor:
        assert self._data is not None
        return self._data

    def _like(self, item: KV) -> None:
        if self._data is None:
            two, layers, heads, _, dim = item.shape
            self._data = item.new_zeros((two, layers, 0, heads, 0, dim))

    def _relayout(self, rows: int, end: int) -> None:
        """Move to a buffer that has room for `rows` and a margin of columns, ending at `end`."""
        old = self._buffer()
        two, layers, _, heads, _, dim = old.shape
        capacity = max(8, 1 << (rows - 1).bit_length())
        data = old.new_zeros((two, layers, capacity, heads, end + max(_HEADROOM, end // 2), dim))
        if self.rows:
            width = min(end, self.end)
            data[:, :, : self.rows, :, end - width : end] = old[:, :, : self.rows, :, self.end - width : self.end]
        self.starts = [start + end - self.end for start in self.starts]
        self._data, self.end = data, end
        self._write_mask()

    def _write_mask(self) -> None:
        data = self._buffer()
        columns = torch.arange(data.shape[4], device=data.device)
        starts = torch.tensor(self.starts, device=data.device, dtype=torch.long)
        lowest = torch.finfo(data.dtype).min
        self._mask = (columns[None] < starts[:, None]).to(data.dtype) * lowest


class PrefillCache(Cache):  # type: ignore[misc]
    """Collects the keys and values of a prefill, after optional earlier ones (`past`, a batch of KV)."""

    def __init__(self, past: torch.Tensor | None) -> None:
        super().__init__(layers=[])
        self._past = past  # [2, layers, rows, heads, columns, dim]
        self.new: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.new.append(torch.stack((key_states, value_states)))
        if self._past is None:
            return key_states, value_states
        past = self._past[:, layer_idx]
        return torch.cat((past[0], key_states), dim=2), torch.cat((past[1], value_states), dim=2)

    def get_seq_length(self, layer_idx: int = 0, *args: object, **kwargs: object) -> int:
        return 0 if self._past is None else self._past.shape[4]


class PrefixStore:
    """Keys and values of token prefixes already computed with the present weights; bounded, least recent out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._items: OrderedDict[tuple[int, ...], KV] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def longest(self, ids: tuple[int, ...]) -> KV | None:
        """The stored KV of the longest proper prefix of `ids`, or None."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(ids) and ids[:length] in self._items:
                self._items.move_to_end(ids[:length])
                return self._items[ids[:length]]
        return None

    def put(self, ids: tuple[int, ...], kv: KV) -> None:
        """Remember `kv` (length len(ids)) of `ids`."""
        size = kv.numel() * kv.element_size()
        if not ids or size > self._max_bytes or ids in self._items:
            return
        self._items[ids] = kv
        self._lengths[len(ids)] += 1
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop_oldest()

    def clear(self) -> None:
        self._items.clear()
        self._lengths.clear()
        self._bytes = 0

    def _drop_oldest(self) -> None:
        ids, kv = self._items.popitem(last=False)
        self._bytes -= kv.numel() * kv.element_size()
        self._lengths[len(ids)] -= 1
        if not self._lengths[len(ids)]:
            del self._lengths[len(ids)]
