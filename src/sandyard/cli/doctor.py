"""`sandyard doctor`: what works on this host, found out by doing it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import Settings, load_settings

if TYPE_CHECKING:
    from sandyard.doctor import Finding


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    runtime: Annotated[str | None, typer.Option(help="what to try: container or microvm [sandbox.runtime]")] = None,
) -> None:
    """Try all that sandboxes need on this host; each failure with its remedy.

    Exit 1 if one fails."""
    ok, failed = asyncio.run(_run(load_settings({"sandbox.runtime": runtime})))
    stdout.print(f"{ok} ok, {failed} to mend")
    raise typer.Exit(1 if failed else 0)


async def _run(settings: Settings) -> tuple[int, int]:
    from sandyard.doctor import diagnose

    found = {True: 0, False: 0}
    async for finding in diagnose(settings):  # some take long: each is shown at once
        _show(finding)
        found[finding.ok] += 1
    return found[True], found[False]


def _show(finding: Finding) -> None:
    mark = "[green]ok  [/green]" if finding.ok else "[red]FAIL[/red]"
    stdout.print(f"{mark} {finding.name:<22} ", end="")
    stdout.print(finding.detail, markup=False, soft_wrap=True)
    if finding.remedy:
        word = "note" if finding.ok else "remedy"
        stdout.print(f"     {word}: {finding.remedy}", markup=False, style="yellow", soft_wrap=True)
