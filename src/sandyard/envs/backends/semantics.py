"""In what back ends differ: the table of `sandyard envs describe`, which tests hold true."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Semantics:
    """What is true of a program that `run_python` runs; each a few words."""

    language: str
    state: str
    files: str
    modules: str
    network: str
    isolation: str

    def __str__(self) -> str:
        return "; ".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))
