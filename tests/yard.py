"""A node of one's own for a test: its directories, its settings, and what it must not leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.container import ContainerRuntime


@contextmanager
def node_home() -> Iterator[Path]:
    """A directory with a short path (Unix sockets must fit), removed afterwards."""
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    try:
        yield home
    finally:
        shutil.rmtree(home)


def node_settings(home: Path, *, low: int = 1, high: int = 4, **sandbox: object) -> Settings:
    """Settings of a node below `home`; its templates are the host's own."""
    state = home / "state"
    state.mkdir(exist_ok=True)
    if not (state / "templates").exists():
        (state / "templates").symlink_to(Settings().paths.state / "templates")
    return Settings(
        paths=PathSettings(state=state, run=home / "run"),
        pool=PoolSettings(low=low, high=high),
        sandbox=SandboxSettings.model_validate(sandbox),
    )


def leftovers(home: Path) -> list[str]:
    """Mounts, processes and loop devices that still belong to the node below `home`."""
    mark = str(home)
    found = [f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if mark in line]
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and process.name != str(os.getpid()):
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            if mark in command:
                found.append(f"process {process.name} {command}")
    listing = ["losetup", "--list", "--noheadings", "--output", "BACK-FILE"]
    loops = subprocess.run(listing, capture_output=True, text=True, check=True)
    return found + [f"loop device {line}" for line in loops.stdout.splitlines() if mark in line]


@asynccontextmanager
async def clean_node(settings: Settings) -> AsyncIterator[None]:
    """The host's base template (built on first use, which takes a minute or two); afterwards no sandbox,
    mount, process, cgroup or loop device of this node exists."""
    await build_base(Settings())
    yield
    runtime = ContainerRuntime(settings)
    sandboxes = await runtime.list()
    await runtime.close()
    assert [*sandboxes, *leftovers(settings.paths.run.parent)] == []
