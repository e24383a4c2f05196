"""`make bench`: every figure beside a peer of the same run, as ratios; JSON and pictures are kept."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import microvm, openenv, overcommit, picture, process_sessions, rollout, sandboxes, sessions, snapshots
from benchmarks.measure import Figure, Report
from sandyard.config import PoolSettings, Settings, load_settings
from sandyard.connection import Connection
from sandyard.errors import HostError
from sandyard.images.templates import TemplateStore
from sandyard.runtimes.microvm.assets import make_assets
from sandyard.server.embedded import EmbeddedServer

RESULTS = Path(__file__).parent / "results"
console = Console()


def main() -> None:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=20, help="samples of each short figure")
    arguments.add_argument(
        "--only",
        choices=["sandboxes", "snapshots", "microvm", "sessions", "rollout", "openenv", "process"],
        help="one section",
    )
    options = arguments.parse_args()
    report, before = Report(), _load()
    if options.only in (None, "sandboxes"):
        _sandboxes(report, options.rounds)
    if options.only in (None, "snapshots"):
        _snapshots(report, options.rounds)
    if options.only in (None, "microvm"):
        _microvm(report, options.rounds)
    if options.only in (None, "sessions"):
        _sessions(report)
    if options.only in (None, "rollout"):
        console.print("[dim]rollout engine[/dim]")
        asyncio.run(rollout.overhead(report))
    if options.only in (None, "openenv"):
        console.print("[dim]OpenEnv server[/dim]")
        asyncio.run(openenv.beside_official(report))
    if options.only in (None, "process"):
        console.print(f"[dim]{process_sessions.SESSIONS} sessions of the back end process[/dim]")
        asyncio.run(process_sessions.live(report))
    load = f"{before} at the start, {_load()} at the end (this run adds about 2)"
    _print(report, load)
    _keep(report, load)


def _sandboxes(report: Report, rounds: int) -> None:
    with _own_yard(load_settings()) as settings:
        _measure(report, settings, rounds)


def _snapshots(report: Report, rounds: int) -> None:
    with _own_yard(load_settings()) as settings, EmbeddedServer(_with_pool(settings, low=0, high=0)) as server:
        console.print("[dim]pause, snapshot, fork[/dim]")
        snapshots.standing_still(report, Connection.to(server), settings.paths.state, rounds)


def _microvm(report: Report, rounds: int) -> None:
    with _own_yard(load_settings()) as settings:
        try:
            asyncio.run(make_assets(settings))
        except HostError as error:
            report.skip("microvm", str(error))
            return
        console.print("[dim]microVMs, by the size of their memory and what of it changed[/dim]")
        asyncio.run(microvm.memory(report, settings, max(rounds // 3, 3)))
        console.print("[dim]many microVMs, and what the host gives them[/dim]")
        asyncio.run(overcommit.overcommit(report, settings, rounds))


def _sessions(report: Report) -> None:
    with _own_yard(load_settings()) as settings:
        # So small that all of them fit on a small host, too: what a sandbox may use is not what it uses.
        sandbox = settings.sandbox.model_copy(update={"memory_mb": 128, "max_count": sessions.SESSIONS + 8})
        settings = settings.model_copy(update={"sandbox": sandbox})
        console.print(f"[dim]{sessions.SESSIONS} sessions at once[/dim]")
        with EmbeddedServer(_with_pool(settings, low=0, high=0)) as server:
            asyncio.run(sessions.concurrent(report, Connection.to(server)))


@contextmanager
def _own_yard(settings: Settings) -> Iterator[Settings]:
    """Directories of our own on the same disk, so that a server that runs here is left alone."""
    state = settings.paths.state.absolute()
    with tempfile.TemporaryDirectory(prefix="sandyard-bench-", dir=state.parent) as name:
        home = Path(name)
        (home / "state").mkdir()
        (home / "state" / "templates").symlink_to(state / "templates")
        paths = settings.paths.model_copy(update={"state": home / "state", "run": home / "run"})
        yield settings.model_copy(update={"paths": paths})


def _measure(report: Report, settings: Settings, rounds: int) -> None:
    rootfs = TemplateStore(settings).get("base").rootfs.layers[0].resolve()  # runc takes no symlink
    console.print("[dim]bare engines[/dim]")
    sandboxes.bare_engines(report, rootfs, rounds)
    sandboxes.pipe(report, rootfs)
    with EmbeddedServer(_with_pool(settings, low=0, high=0)) as server:
        connection = Connection.to(server)
        console.print("[dim]cold creates, burst, idle memory[/dim]")
        asyncio.run(sandboxes.creation(report, connection, "create → first result, cold", 40, rounds))
        asyncio.run(sandboxes.burst(report, connection))
        asyncio.run(sandboxes.idle_memory(report, connection, rootfs, server.pid or 0))
    with EmbeddedServer(_with_pool(settings, low=4, high=8)) as server:
        connection = Connection.to(server)
        console.print("[dim]warm creates, exec, files[/dim]")
        time.sleep(2.0)  # until the pool is warm
        kills = asyncio.run(sandboxes.creation(report, connection, "create → first result, warm", 10, rounds))
        peer = sandboxes.engine_peer(report)
        report.add(Figure("kill", kills, peer=peer, note="answered when nothing of it runs any more"))
        sandboxes.round_trips(report, connection, rootfs, rounds * 3)
        sandboxes.files(report, connection)


def _with_pool(settings: Settings, low: int, high: int) -> Settings:
    return settings.model_copy(update={"pool": PoolSettings(low=low, high=high)})


def _print(report: Report, load: str) -> None:
    table = Table(box=None, header_style="bold", title=f"{os.cpu_count()} cores; load {load}", title_justify="left")
    for column in ("figure", "p50", "p95", "budget", "", "times the peer", "n", "note"):
        table.add_column(column, justify="left" if column in ("figure", "", "note") else "right")
    for figure in sorted(report.figures, key=report.is_peer):
        table.add_row(*_cells(report, figure), style="dim" if report.is_peer(figure) else None)
    console.print(table)
    console.print("[dim]p95: 95 % were at least as good. times the peer: below 1 is better. Dim: the peers.[/dim]")
    for line in report.skipped:
        console.print(f"left out: {line}", style="yellow")


def _cells(report: Report, figure: Figure) -> list[str]:
    ratio = report.ratio(figure)
    p95 = f"{figure.p95:.1f}" if len(figure.samples) > 1 else ""
    budget = f"{figure.budget:g}" if figure.budget is not None else ""
    verdict = {None: "", True: "kept", False: "[red]missed[/red]"}[figure.within_budget]
    times = f"{ratio:.2f} x {figure.peer}" if ratio is not None else ""
    return [
        figure.name,
        f"{figure.p50:.1f} {figure.unit}",
        p95,
        budget,
        verdict,
        times,
        str(len(figure.samples)),
        figure.note,
    ]


def _load() -> str:
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def _keep(report: Report, load: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / time.strftime("%Y%m%d-%H%M%S")
    machine = platform.uname()._asdict() | {"node": "", "cores": os.cpu_count(), "load": load}
    rows = [
        {
            "name": f.name,
            "unit": f.unit,
            "p50": f.p50,
            "p95": f.p95,
            "n": len(f.samples),
            "budget": f.budget,
            "peer": f.peer,
            "ratio": report.ratio(f),
        }
        for f in report.figures
    ]
    document = {"machine": machine, "figures": rows, "skipped": report.skipped}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=2))
    picture.draw(report, stem.with_suffix(".png"), load)
    kept = [f"{stem}.json", f"{stem}.png"]
    costs = stem.with_name(f"{stem.name}-microvm.svg")
    if picture.draw_costs(report, costs, load):
        kept.append(str(costs))
    console.print(f"kept: {', '.join(kept)}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
