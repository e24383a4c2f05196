"""`sandyard doctor`: what works on this host, found out by doing it."""

from __future__ import annotations

import asyncio

import typer

from sandyard.cli.console import stdout
from sandyard.config import load_settings


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor() -> None:
    """Try every thing a sandbox needs on this host; exit 1 if one fails, each with its remedy."""
    from sandyard.doctor import diagnose

    findings = asyncio.run(diagnose(load_settings()))
    for finding in findings:
        mark = "[green]ok  [/green]" if finding.ok else "[red]FAIL[/red]"
        stdout.print(f"{mark} {finding.name:<22} ", end="")
        stdout.print(finding.detail, markup=False)
        if finding.remedy:
            stdout.print(f"     {'better' if finding.ok else 'remedy'}: {finding.remedy}", markup=False, style="yellow")
    failed = sum(not finding.ok for finding in findings)
    stdout.print(f"{len(findings) - failed} ok, {failed} to mend")
    raise typer.Exit(1 if failed else 0)
