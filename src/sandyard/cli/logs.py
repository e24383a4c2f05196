"""`sandyard logs`: what happened to a sandbox."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from sandyard.cli.console import Output, stdout
from sandyard.cli.rest import call, lives, word

POLL_SECONDS = 1.0
_STYLES = {"debug": "dim", "info": "", "warn": "yellow", "error": "red"}


def add(target: typer.Typer) -> None:
    target.command("logs")(logs)


def logs(
    sandbox_id: Annotated[str, typer.Argument(metavar="ID", help="a sandbox that lives or died within a day")],
    limit: Annotated[int, typer.Option("--limit", "-n", help="the newest so many lines", min=1, max=1000)] = 100,
    level: Annotated[
        Literal["debug", "info", "warn", "error"] | None, typer.Option(help="only this and what is worse")
    ] = None,
    search: Annotated[str | None, typer.Option(help="only lines that contain this")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what comes, until Ctrl-C")] = False,
    output: Annotated[Output, typer.Option(help="auto: lines on a terminal, else one JSON object a line")] = "auto",
) -> None:
    """Tell what happened to a sandbox: its life, its processes, the output of its start command."""
    path = f"/v2/sandboxes/{word(sandbox_id)}/logs"
    filters = {name: value for name, value in (("level", level), ("search", search)) if value}
    found = call("GET", path, params={**filters, "limit": limit, "direction": "backward"}).json()["logs"]
    found.reverse()
    tail = _Tail()
    _print(tail.fresh(found), output)
    while follow:
        time.sleep(POLL_SECONDS)
        found = tail.fresh(call("GET", path, params={**filters, "cursor": tail.cursor}).json()["logs"])
        _print(found, output)
        if not found and not lives(sandbox_id):
            break


class _Tail:
    """What of a page was not told yet. A cursor is in milliseconds, so the last lines come again."""

    def __init__(self) -> None:
        self.cursor = 0
        self._told: list[dict[str, Any]] = []

    def fresh(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        new = [entry for entry in entries if entry not in self._told]
        if new:
            self.cursor = _milliseconds(new[-1])
            self._told = [entry for entry in [*self._told, *new] if _milliseconds(entry) == self.cursor]
        return new


def _print(entries: list[dict[str, Any]], output: Output) -> None:
    as_json = output == "json" or (output == "auto" and not sys.stdout.isatty())
    for entry in entries:
        if as_json:
            print(json.dumps(entry, ensure_ascii=False))
            continue
        fields = " ".join(f"{name}={value}" for name, value in entry["fields"].items())
        line = f"{entry['timestamp']} {entry['level']:<5} {entry['message']}" + (f"  {fields}" if fields else "")
        stdout.print(line, style=_STYLES.get(entry["level"]), markup=False, soft_wrap=True)
    sys.stdout.flush()


def _milliseconds(entry: dict[str, Any]) -> int:
    return int(datetime.fromisoformat(entry["timestamp"]).timestamp() * 1000)
