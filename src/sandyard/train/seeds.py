"""Seeds that do not depend on what ran before: every random choice is a function of names and numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from sandyard.envs.seeds import derive_seed as derive_seed


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
