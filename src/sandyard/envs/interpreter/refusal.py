"""Why a program is not run."""

from __future__ import annotations

import ast
from dataclasses import dataclass

ADVICE = "run this with back end 'process' or 'sandbox'"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a program is not run. `line` counts from 1 (0: unknown), `column` from 0."""

    construct: str
    line: int
    column: int
    advice: str = ADVICE

    def __str__(self) -> str:
        return f"unsupported: {self.construct} at line {self.line}: {self.advice}"


class Refused(Exception):
    """Raised inside the guard; `refusal` says why."""

    def __init__(self, construct: str, node: ast.AST) -> None:
        super().__init__(construct)
        self.refusal = Refusal(construct, getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
