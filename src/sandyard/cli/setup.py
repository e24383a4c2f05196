"""`sandyard setup [base|code-interpreter|microvm]`: install what the host lacks and make templates."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum
from typing import Annotated

import typer

from sandyard.cli.console import stdout
from sandyard.config import Settings, load_settings

_EVERY = 5.0  # seconds between lines of detail, such as a package manager's own


class What(StrEnum):
    BASE = "base"
    CODE_INTERPRETER = "code-interpreter"
    MICROVM = "microvm"


def register(app: typer.Typer) -> None:
    app.command("setup")(setup)


def setup(
    what: Annotated[What, typer.Argument(help="what to make ready")] = (What.BASE),
    base: Annotated[str | None, typer.Option(help="make `base` from this image reference or rootfs tarball")] = None,
    mirror: Annotated[str | None, typer.Option(help="apt mirror for `base` [the host's own]")] = None,
) -> None:
    """Set this host up. Safe to repeat: what is there already is kept.

    base: the container engine and the template `base`, which sandboxes start from.

    microvm: `base`, QEMU and a kernel, for `sandyard serve --runtime microvm`.

    code-interpreter: `base` and the template `code-interpreter-v1`."""
    lines = SetupLines()
    runtime = "microvm" if what is What.MICROVM else None
    settings = load_settings({"images.base": base, "images.mirror": mirror, "sandbox.runtime": runtime})
    asyncio.run(_setup(what, settings, lines))
    if what is What.CODE_INTERPRETER:
        lines("done", 1.0, "code runs in template `code-interpreter-v1`, which is also called `code-interpreter`")
    elif what is What.MICROVM:
        lines("done", 1.0, "sandboxes have a kernel of their own with `sandyard serve --runtime microvm`")
    else:
        lines("done", 1.0, "sandboxes start from template `base`; `sandyard doctor` tells more")


async def _setup(what: What, settings: Settings, lines: SetupLines) -> None:
    from sandyard.images.setup import setup as run_setup

    ready = await run_setup(settings, lines)
    if ready.installed:
        lines("done", 1.0, f"installed Debian packages: {', '.join(ready.installed)}")
    if what is What.CODE_INTERPRETER:
        from sandyard.interpreter.template import build_interpreter

        await build_interpreter(settings, lines)


class SetupLines:
    """Prints each stage as it begins and ends, and of what lies between one line every few seconds."""

    def __init__(self, verb: str = "setup") -> None:
        self._verb = verb
        self._started = time.monotonic()
        self._last = 0.0

    def __call__(self, stage: str, fraction: float | None, line: str) -> None:
        now = time.monotonic()
        if fraction not in (0.0, 1.0) and now - self._last < _EVERY:
            return
        self._last = now
        percent = f" {fraction:.0%}" if fraction not in (None, 0.0, 1.0) else ""
        stdout.print(f"[bold]\\[{self._verb}][/bold] {now - self._started:5.1f} s  ", end="")
        stdout.print(f"{stage}{percent}: {line}", markup=False, soft_wrap=True)
