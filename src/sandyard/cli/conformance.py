"""`sandyard conformance`: the runtime contract as checks, on this host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import Settings, load_settings

if TYPE_CHECKING:
    from sandyard.runtimes.conformance import CheckResult


def register(app: typer.Typer) -> None:
    app.command("conformance")(conformance)


def conformance(
    runtime: Annotated[str, typer.Option(help="runtime to check")] = "container",
    template: Annotated[str, typer.Option(help="template to start from")] = "base",
) -> None:
    """Run every check of the runtime contract; exit 1 if one fails."""
    results = asyncio.run(_run(load_settings({"sandbox.runtime": runtime}), template))
    failed = sum(not result.ok for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


async def _run(settings: Settings, template: str) -> list[CheckResult]:
    from sandyard.images.templates import TemplateStore
    from sandyard.runtimes import open_runtime
    from sandyard.runtimes.conformance import run_conformance

    rootfs = TemplateStore(settings).get(template).rootfs
    runtime = open_runtime(settings)
    try:
        return await run_conformance(runtime, rootfs, on_result=_print_result)
    finally:
        await runtime.close()


def _print_result(result: CheckResult) -> None:
    mark = "[green]ok  [/green]" if result.ok else "[red]FAIL[/red]"
    stdout.print(f"{mark} {result.name} [dim]{result.seconds:.2f} s[/dim] ", end="")
    stdout.print(result.detail, markup=False)
