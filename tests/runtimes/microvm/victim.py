"""A server of one sandbox, to be killed or stopped: `python victim.py STATE RUN MOVE LAYER` makes one move with it."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import structlog

from sandyard.config import PathSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime, disks

NAME = "victim"
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)


async def main(state: Path, run: Path, move: str, layer: Path) -> None:
    """On SIGTERM it lets go of its sandboxes, as a server does that keeps them."""
    disks.DEEPEST = 2  # so that disks are made one image often
    runtime = MicroVMRuntime(Settings(paths=PathSettings(state=state, run=run)))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    moving = asyncio.ensure_future(_serve(runtime, move, layer))
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait((moving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stopped.is_set():
        await moving
    await runtime.close()
    stopping.cancel()


async def _serve(runtime: MicroVMRuntime, move: str, layer: Path) -> None:
    base = (await build_base(Settings())).rootfs
    spec = SandboxSpec(NAME, base, SMALL, hostname=NAME)
    if move in ("wake", "fork"):
        await stand_ready(runtime, spec)
    if move == "wake":
        print("go", flush=True)
        await runtime.wake(spec)
    else:
        found = await runtime.adopt(NAME)
        if found is None:
            raise SystemExit("there is no sandbox")
        print("go", flush=True)
        await _move(runtime, found, base, move, layer)
    print("done", flush=True)


async def stand_ready(runtime: MicroVMRuntime, spec: SandboxSpec) -> None:
    """What it starts is started as by a server that has run for a while."""
    spares = runtime.host.spares
    spares.want(runtime.host.starter.kind(await runtime.choose(), spec))
    async with asyncio.timeout(120):
        while not spares.ready():  # noqa: ASYNC110 - nothing tells a test
            await asyncio.sleep(0.01)


async def _move(runtime: MicroVMRuntime, found: Instance, base: Rootfs, move: str, layer: Path) -> None:
    if move == "suspend":
        await runtime.suspend(NAME)
        return
    await found.commit(layer, memory=True)
    if move == "fork":
        await runtime.create(copy_of(base, layer))


def copy_of(base: Rootfs, layer: Path) -> SandboxSpec:
    stack = replace(base, layers=[layer, *base.layers])
    return SandboxSpec("child", stack, SMALL, hostname="child", memory=layer)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what it prints is read
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
