"""`sandyard setup`: install what the host lacks and make the `base` template."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import load_settings

_EVERY = 5.0  # seconds between lines of detail, such as a package manager's own


def register(app: typer.Typer) -> None:
    app.command("setup")(setup)


def setup(
    base: Annotated[str | None, typer.Option(help="make `base` from this image reference or rootfs tarball")] = None,
    mirror: Annotated[str | None, typer.Option(help="apt mirror for `base` [the host's own]")] = None,
) -> None:
    """Set this host up. Safe to repeat: what is there already is kept."""
    from sandyard.images.setup import setup as run_setup

    lines = SetupLines()
    ready = asyncio.run(run_setup(load_settings({"images.base": base, "images.mirror": mirror}), lines))
    if ready.installed:
        lines("done", 1.0, f"installed Debian packages: {', '.join(ready.installed)}")
    lines("done", 1.0, "sandboxes start from template `base`; `sandyard doctor` tells more")


class SetupLines:
    """Prints each stage as it begins and ends, and of what lies between one line every few seconds."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._last = 0.0

    def __call__(self, stage: str, fraction: float | None, line: str) -> None:
        now = time.monotonic()
        if fraction not in (0.0, 1.0) and now - self._last < _EVERY:
            return
        self._last = now
        percent = f" {fraction:.0%}" if fraction not in (None, 0.0, 1.0) else ""
        stdout.print(f"[bold]\\[setup][/bold] {now - self._started:5.1f} s  ", end="")
        stdout.print(f"{stage}{percent}: {line}", markup=False)
