"""`make bench`: every figure beside a peer of the same run, as ratios; JSON and a picture are kept."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import picture, rollout, sandboxes
from benchmarks.measure import Figure, Report
from sandyard.config import PoolSettings, Settings, load_settings
from sandyard.connection import Connection
from sandyard.images.templates import TemplateStore
from sandyard.server.embedded import EmbeddedServer

RESULTS = Path(__file__).parent / "results"
console = Console()


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=20, help="samples of each short figure")
    arguments.add_argument("--only", choices=["sandboxes", "rollout"], help="one section")
    options = arguments.parse_args()
    report = Report()
    if options.only != "rollout":
        _sandboxes(report, options.rounds)
    if options.only != "sandboxes":
        console.print("[dim]rollout engine[/dim]")
        asyncio.run(rollout.overhead(report))
    _print(report)
    _keep(report)


def _sandboxes(report: Report, rounds: int) -> None:
    settings = load_settings()
    rootfs = TemplateStore(settings).get("base").rootfs.layers[0]
    console.print("[dim]bare engines[/dim]")
    sandboxes.bare_engines(report, rootfs, rounds)
    sandboxes.pipe(report, rootfs)
    with EmbeddedServer(_with_pool(settings, low=0, high=0)) as server:
        connection = Connection.to(server)
        console.print("[dim]cold creates, burst, idle memory[/dim]")
        asyncio.run(sandboxes.creation(report, connection, "create → first result, cold", 40, rounds))
        asyncio.run(sandboxes.burst(report, connection))
        asyncio.run(sandboxes.idle_memory(report, connection, rootfs))
    with EmbeddedServer(_with_pool(settings, low=4, high=8)) as server:
        connection = Connection.to(server)
        console.print("[dim]warm creates, exec, files[/dim]")
        time.sleep(1.0)
        asyncio.run(sandboxes.creation(report, connection, "create → first result, warm", 10, rounds))
        sandboxes.round_trips(report, connection, rootfs, rounds * 3)
        sandboxes.files(report, connection)


def _with_pool(settings: Settings, low: int, high: int) -> Settings:
    return settings.model_copy(update={"pool": PoolSettings(low=low, high=high)})


def _print(report: Report) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("figure", "p50", "p95", "budget", "ratio to peer (lower is better)", "n", ""):
        table.add_column(column, justify="left" if column in ("figure", "") else "right")
    for figure in report.figures:
        table.add_row(figure.name, *_cells(report, figure), str(len(figure.samples)), figure.note)
    console.print(table)
    for line in report.skipped:
        console.print(f"left out: {line}", style="yellow")


def _cells(report: Report, figure: Figure) -> tuple[str, str, str, str]:
    ratio = report.ratio(figure)
    p95 = f"{figure.p95:.1f}" if len(figure.samples) > 1 else ""
    budget = f"{figure.budget:g}" if figure.budget is not None else ""
    return f"{figure.p50:.1f} {figure.unit}", p95, budget, f"{ratio:.2f} x {figure.peer}" if ratio is not None else ""


def _keep(report: Report) -> None:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / time.strftime("%Y%m%d-%H%M%S")
    rows = [
        {
            "name": f.name,
            "unit": f.unit,
            "p50": f.p50,
            "p95": f.p95,
            "n": len(f.samples),
            "peer": f.peer,
            "ratio": report.ratio(f),
        }
        for f in report.figures
    ]
    document = {"machine": platform.uname()._asdict() | {"node": ""}, "figures": rows, "skipped": report.skipped}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=2))
    picture.draw(report, stem.with_suffix(".png"))
    console.print(f"kept: {stem}.json and {stem}.png", markup=False)


if __name__ == "__main__":
    main()
