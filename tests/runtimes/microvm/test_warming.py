"""What is run in a guest before it becomes a base leaves nothing."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed
from sandyard.guest.base import Channel, ExitStatus, Process
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import warming

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
LEAST = Resources(memory_mb=128, disk_mb=64, pids=64)


async def made(runtime: MicroVMRuntime, base: Rootfs, name: str, resources: Resources = LEAST) -> Kit:
    return Kit(runtime, base, await runtime.create(SandboxSpec(name, base, resources, hostname="box")))


async def test_no_script_of_a_template_is_run(runtime: MicroVMRuntime, base: Rootfs, settings: Settings) -> None:
    layers = settings.paths.state / "layers"
    shutil.rmtree(layers, ignore_errors=True)
    layers.mkdir(parents=True)
    kit = await made(runtime, base, "template")
    mark = "printf '#!/bin/sh\\n: >>/root/ran\\n'"
    await kit.output(f"cd /usr/local/bin; for name in git python3 id; do {mark} >$name; chmod 755 $name; done")
    await kit.sandbox.commit(layers / "layer")
    await runtime.destroy("template")
    other = await made(runtime, replace(base, layers=[layers / "layer", *base.layers]), "copy")
    assert await other.output("test -e /root/ran || echo no; git; test -e /root/ran && echo yes") == "no\nyes"


class Endless(Process):
    """One that ends when it is killed, or not even then."""

    pid = 77

    def __init__(self, *, mortal: bool) -> None:
        self._ended = asyncio.Event()
        self._mortal = mortal
        self.signals: list[tuple[int, bool]] = []

    async def signal(self, number: int, *, group: bool = True) -> None:
        self.signals.append((number, group))
        if self._mortal:
            self._ended.set()

    async def wait(self) -> ExitStatus:
        await self._ended.wait()
        return ExitStatus(signal=9)

    def output(self) -> AsyncIterator[tuple[Channel, bytes]]:
        raise NotImplementedError

    write_stdin = close_stdin = resize = AsyncMock()


def guest(process: Process) -> MicroVMInstance:
    agent = SimpleNamespace(spawn=AsyncMock(return_value=process))
    spec = SandboxSpec("one", Rootfs([]), LEAST)
    return cast(MicroVMInstance, SimpleNamespace(agent=agent, spec=spec))


async def test_what_hangs_is_ended_or_there_is_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_PATIENCE", 0.1)
    monkeypatch.setattr(warming, "_END", 0.1)
    slow, stuck = Endless(mortal=True), Endless(mortal=False)
    await warming.warm(guest(slow))
    assert slow.signals == [(signal.SIGKILL, True)]
    with pytest.raises(CreateFailed, match="does not end: 77"):
        await warming.warm(guest(stuck))
