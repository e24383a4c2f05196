"""What the commands print with, and how they print lists."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)

Output = Literal["auto", "table", "json"]


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Output) -> None:
    """A table for people; JSON when asked for or when the output is piped."""
    if output == "json" or (output == "auto" and not sys.stdout.isatty()):
        print(json.dumps(list(rows), indent=2, default=str))
        return
    if not rows:
        stdout.print("none")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    first, *others = columns
    # The first column is what people copy: it is never cut, however narrow the terminal.
    table.add_column(first, no_wrap=True, min_width=max(len(_cell(row.get(first))) for row in rows))
    for column in others:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    stdout.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return "" if value is None else str(value)
