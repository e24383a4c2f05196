"""A node of one's own for a test: its directories, its settings, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from sandyard.config import PathSettings, PoolSettings, SandboxSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.container import ContainerRuntime
from sandyard.runtimes.microvm.assets import make_assets, packaged_kernel
from sandyard.runtimes.microvm.layout import Layout


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


needs_qemu = pytest.mark.skipif(shutil.which(Settings().microvm.qemu) is None, reason="this host has no QEMU")


async def guest_settings(settings: Settings) -> Settings:
    """`settings` for guests that boot the host's own kernel (got on first use); block images of templates are
    the host's own too."""
    own = Layout.of(Settings())
    own.prepare()
    kernel, modules = await asyncio.to_thread(packaged_kernel, own.assets / "kernels")
    images = Layout.of(settings).images
    images.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not images.exists():
        images.symlink_to(own.images)
    update = {
        "microvm": settings.microvm.model_copy(update={"kernel": kernel, "modules": modules}),
        "sandbox": settings.sandbox.model_copy(update={"runtime": "microvm"}),
    }
    ready = settings.model_copy(update=update)
    await make_assets(ready)
    return ready


def share_boots(source: Settings, target: Settings) -> None:
    """What guests of `source` booted, which accelerator does and their bases, need not boot again for `target`: it
    has further names of those files, which are never written."""
    seed, layout = Layout.of(source), Layout.of(target)
    if (seed.assets / "accel.json").exists():
        shutil.copyfile(seed.assets / "accel.json", layout.assets / "accel.json")
    for home in seed.bases.glob("[!.]*"):
        if not (layout.bases / home.name).exists():
            shutil.copytree(home, layout.bases / home.name, copy_function=os.link)


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
