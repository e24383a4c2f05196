"""How a pull is shown: a bar for each layer on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sandyard.cli.console import stdout
from sandyard.cli.setup import SetupLines
from sandyard.images.progress import Progress as Lines

_LAYER = re.compile(r"(layer \d+ of \d+): (?:([\d.]+) of ([\d.]+) MiB|(.*))")


@contextmanager
def pull_lines() -> Iterator[Lines]:
    """What a pull tells its progress to."""
    if not stdout.is_terminal:
        yield SetupLines("pull")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn())
    with Progress(*columns, console=stdout) as bars:
        yield LayerBars(bars)


class LayerBars:
    """A bar for each layer; what is said of no layer stands above them."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._layers: dict[str, TaskID] = {}

    def __call__(self, stage: str, fraction: float | None, line: str) -> None:
        found = _LAYER.fullmatch(line)
        if found is None:
            self._bars.console.print(escape(line), highlight=False)
            if fraction == 1.0:
                for task in self._layers.values():
                    self._bars.update(task, what="done")
            return
        name, come, size, what = found.groups()
        if name not in self._layers:
            self._layers[name] = self._bars.add_task(name, what="", total=None)
        if what is None:
            shown = {"completed": float(come), "total": max(float(size), 0.1)}
            self._bars.update(self._layers[name], what=f"{come} of {size} MiB", **shown)  # type: ignore[arg-type] # rich takes both
        else:
            self._bars.update(self._layers[name], what=what)
