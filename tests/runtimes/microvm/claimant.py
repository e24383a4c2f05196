"""A server that is killed while a VMM that stood ready becomes a sandbox's: `python claimant.py STATE RUN STEP`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from sandyard.config import PathSettings, Settings
from sandyard.images.base import build_base
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.microvm import MicroVMRuntime, claim
from tests.runtimes.microvm.victim import NAME, SMALL, stand_ready

READY = "ready"
"""The step in which nothing has been claimed yet."""


async def main(state: Path, run: Path, step: str) -> None:
    runtime = MicroVMRuntime(Settings(paths=PathSettings(state=state, run=run)))
    base = (await build_base(Settings())).rootfs
    spec = SandboxSpec(NAME, base, SMALL, hostname=NAME)
    await stand_ready(runtime, spec)
    if step == READY:
        _die()
    where, _, name = step.rpartition(".")
    setattr(getattr(claim, where) if where else claim, name, _die)
    await runtime.wake(spec)
    raise SystemExit(f"{step} was not reached")


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
