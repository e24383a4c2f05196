"""`sandyard setup`: install what the host lacks and make the `base` template."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import load_settings


def register(app: typer.Typer) -> None:
    app.command("setup")(setup)


def setup(
    base: Annotated[str | None, typer.Option(help="make `base` from this image reference or rootfs tarball")] = None,
    mirror: Annotated[str | None, typer.Option(help="apt mirror for `base` [the host's own]")] = None,
) -> None:
    """Set this host up. Safe to repeat: what is there already is kept."""
    from sandyard.images.setup import setup as run_setup

    started = time.monotonic()

    def progress(line: str) -> None:
        stdout.print(f"[bold]\\[setup][/bold] {time.monotonic() - started:5.1f} s  ", end="")
        stdout.print(line, markup=False)

    asyncio.run(run_setup(load_settings({"images.base": base, "images.mirror": mirror}), progress))
    progress("done")
