"""The in-memory twin behaves as a runtime to those who hold it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandyard.config import SandboxSettings, Settings
from sandyard.errors import CreateFailed, DeathReason
from sandyard.guest.base import Channel, ProcessSpec
from sandyard.runtimes import open_runtime
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.memory import MemoryRuntime

SPEC = SandboxSpec("box", Rootfs([Path("/")]))


async def test_settings_choose_it() -> None:
    runtime = open_runtime(Settings(sandbox=SandboxSettings(runtime="memory")))
    assert isinstance(runtime, MemoryRuntime)
    assert (await runtime.probe()).works


async def test_a_life() -> None:
    runtime = MemoryRuntime()
    made = await runtime.create(SPEC)
    with pytest.raises(CreateFailed):
        await runtime.create(SPEC)
    process = await made.agent.spawn(ProcessSpec(["echo", "hi"]))
    assert [item async for item in process.output()] == [(Channel.STDOUT, b"hi\n")]
    assert (await made.usage()).pids >= 1
    assert await runtime.list() == ["box"]
    assert await runtime.adopt("box") is made
    waiting = asyncio.ensure_future(made.wait_dead())
    await runtime.destroy("box")
    await runtime.destroy("box")
    assert (await waiting).reason is DeathReason.KILLED
    assert await runtime.list() == []
    assert await runtime.adopt("box") is None


async def test_failures_and_deaths_can_be_staged() -> None:
    runtime = MemoryRuntime()
    runtime.fail_next.append(CreateFailed("disk", "full"))
    with pytest.raises(CreateFailed, match="disk"):
        await runtime.create(SPEC)
    await runtime.create(SPEC)
    await runtime.instances["box"].die(DeathReason.OOM, "bomb")
    death = await runtime.instances["box"].wait_dead()
    assert (death.reason, death.detail) == (DeathReason.OOM, "bomb")
