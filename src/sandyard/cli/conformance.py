"""`sandyard conformance`: the runtime contract as checks, on this host."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import Settings, load_settings
from sandyard.errors import HostError

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
    from sandyard.runtimes.conformance.runner import summary

    print(summary(results))
    raise typer.Exit(1 if any(result.ok is False for result in results) else 0)


async def _run(settings: Settings, template: str) -> list[CheckResult]:
    from sandyard.images.templates import TemplateStore
    from sandyard.runtimes import open_runtime
    from sandyard.runtimes.conformance import run_conformance

    runtime = open_runtime(settings)
    try:
        probe = await runtime.probe()
        if not probe.works:
            raise HostError(f"the {runtime.name} runtime does not work: {probe.detail}", remedy=probe.remedy)
        rootfs = TemplateStore(settings).get(template).rootfs
        stdout.print(f"{runtime.name}: {probe.detail}", markup=False, soft_wrap=True)
        return await run_conformance(runtime, rootfs, on_result=_print_result)
    finally:
        await runtime.close()


def _print_result(result: CheckResult) -> None:
    marks = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "[dim]n/a [/dim]"}
    mark = marks[result.ok]
    stdout.print(f"{mark} {result.name} [dim]{result.seconds:.2f} s[/dim] ", end="")
    stdout.print(result.detail, markup=False, soft_wrap=True)
