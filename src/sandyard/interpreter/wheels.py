"""Fetching Python packages for a template: on the host, for the template's Python and C library."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import HostError
from sandyard.images.progress import Progress, run_watched

_OLDEST = 5  # of glibc 2.x, that wheels are made for


@dataclass(frozen=True, slots=True)
class Target:
    """What wheels must fit: Python's version ("3.11"), glibc's ("2.36") and the machine ("x86_64")."""

    python: str
    glibc: str
    machine: str

    @classmethod
    def parse(cls, words: str) -> Target:
        """From `PROBE`'s output. Raises `HostError` for a C library that is not glibc."""
        python, library, glibc, machine = (*words.split("|"), "", "", "")[:4]
        if library != "glibc" or not glibc.startswith("2."):
            raise HostError(
                f"the base template's C library is {library or 'none that Python knows'}",
                remedy="set images.base to a root file system with glibc",
            )
        return cls(python, glibc, machine)

    def platforms(self) -> list[str]:
        """Tags of the wheels that run there, the newest first (PEP 600)."""
        minor = int(self.glibc.split(".")[1])
        tags = [f"manylinux_2_{number}_{self.machine}" for number in range(minor, _OLDEST - 1, -1)]
        return [*tags, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]


# Run by the template's Python; `Target.parse` reads what it says.
PROBE = (
    "import platform, sys; print('%d.%d|%s|%s|%s' % (*sys.version_info[:2], *platform.libc_ver(), platform.machine()))"
)


async def fetch(packages: Sequence[str], target: Target, into: Path, progress: Progress) -> None:
    """Download wheels of `packages` and all they need. Raises `HostError` saying what to do."""
    if importlib.util.find_spec("pip") is None:
        raise HostError("pip is not installed beside sandyard", remedy=f"run: {sys.executable} -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "off", "--only-binary", ":all:", "--dest", str(into)]
    command += ["--python-version", target.python, "--implementation", "cp"]
    for platform in target.platforms():
        command += ["--platform", platform]
    seen = 0

    def on_line(line: str) -> None:
        nonlocal seen
        seen += line.startswith("Collecting")
        progress("download", min(0.05 + seen / 150, 0.4), line)

    try:
        await run_watched([*command, *packages], on_line)
    except HostError as error:
        message = f"packages for Python {target.python} could not be fetched: {error.message}"
        raise HostError(message, remedy="check the package index that pip uses (pip config list)") from error
