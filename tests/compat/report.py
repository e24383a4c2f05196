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
    left: Sequence[str] = ()  # what did not pass, one line each

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
    for row in rows:
        if row.left:
            console.print(f"not passed of {row.part}, {row.name}:", style="bold", markup=False)
        for line in row.left:
            console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
