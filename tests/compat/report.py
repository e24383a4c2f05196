"""What a part found: one row per number, with the bar it is held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

console = Console()


@dataclass(frozen=True, slots=True)
class Row:
    """`passed` of `total`; `bar` is the least that must pass, None where a number is only told."""

    part: str
    name: str
    passed: int
    total: int
    bar: int | None = None
    note: str = ""

    @property
    def kept(self) -> bool:
        return self.bar is None or self.passed >= self.bar


def say(text: str) -> None:
    console.print(f"[dim]{text}[/dim]", highlight=False)


def show(rows: Sequence[Row]) -> None:
    table = Table(box=None, header_style="bold", title="compatibility", title_justify="left")
    for column in ("part", "what", "passed", "of", "bar", "", "note"):
        table.add_column(column, justify="right" if column in ("passed", "of", "bar") else "left")
    for row in rows:
        verdict = "" if row.bar is None else "kept" if row.kept else "[red]missed[/red]"
        bar = "" if row.bar is None else str(row.bar)
        table.add_row(row.part, row.name, str(row.passed), str(row.total), bar, verdict, row.note)
    console.print(table)
