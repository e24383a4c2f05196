"""Seeds that do not depend on what ran before: every random choice is a function of names and numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts; the same parts give the same seed on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def task_order(count: int, seed: int, start: int = 0) -> Iterator[int]:
    """Indices of tasks without end: every epoch is a shuffle of its own, from `seed` and its number.

    `start` skips that many, so that a resumed run goes on where it stopped.
    """
    epoch, offset = divmod(start, count)
    while True:
        order = list(range(count))
        random.Random(derive_seed("tasks", seed, epoch)).shuffle(order)
        yield from order[offset:]
        epoch, offset = epoch + 1, 0
