"""The contract of what `store verify` checks: one object for each kind of thing that is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be. `path` is what `set_aside` moves; None where there is nothing to move."""

    name: str
    problem: str
    path: Path | None = None


@dataclass(slots=True)
class Checkup:
    """Of one kind: how many things there are and their bytes on disk; `damaged` ones, and `orphans`, which nothing
    names: those of killed processes, say. `unknown` ones look whole, and there is nothing to compare them to."""

    kind: str
    count: int = 0
    size_bytes: int = 0
    unknown: int = 0
    damaged: list[Finding] = field(default_factory=list)
    orphans: list[Finding] = field(default_factory=list)


class Checked(Protocol):
    """One kind of thing. Blocking; things may come and go meanwhile, and what went is no damage."""

    kind: str

    def check(self, *, deep: bool) -> Checkup:
        """`deep`: read every content; else what can be seen without: names, sizes, modes, times."""
        ...


def check_all(kinds: Sequence[Checked], *, deep: bool) -> Sequence[Checkup]:
    """Each kind in turn. Raises `OSError` where the store cannot be read at all."""
    return [kind.check(deep=deep) for kind in kinds]


def set_aside(found: Finding, aside: Path) -> Path | None:
    """Move a damaged thing to the directory `aside`, of the same file system, under a name of its own; where it went.

    What is mounted from it stays mounted. Raises `OSError`."""
    if found.path is None or not os.path.lexists(found.path):
        return None
    aside.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = aside / f"{found.path.name}-{os.urandom(4).hex()}"
    found.path.rename(target)
    return target
