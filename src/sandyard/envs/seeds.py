"""A seed from names and numbers, and a task that carries one."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from sandyard.tasks.base import Task

_EPISODE_BITS = 31  # what every generator of random numbers takes


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts; the same parts give the same seed on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def with_seed(task: Task, *parts: int | str) -> Task:
    """`task` with a seed for its episode from `parts` (31 bits), unless it has one of its own."""
    if task.metadata.get("seed") is not None:
        return task
    return replace(task, metadata={**task.metadata, "seed": derive_seed(*parts) >> (63 - _EPISODE_BITS)})
