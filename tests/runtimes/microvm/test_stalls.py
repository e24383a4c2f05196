"""Guests that stand still for want of room on the host's disk while they are made: told at once, and undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed, HostFull
from sandyard.guest.client import LinkAgent
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, bringup
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, restore
from tests.runtimes.microvm.victim import SMALL

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
QUICK = 20.0  # seconds, where an agent is given 120 to answer


def stalled(instance: MicroVMInstance) -> None:
    """As QEMU tells it."""
    instance._on_event("BLOCK_IO_ERROR", {"action": "stop"})


async def _never(*_: object, **__: object) -> LinkAgent:
    for instance in _held:
        stalled(instance)
    await asyncio.sleep(600)
    raise AssertionError


_held: list[MicroVMInstance] = []


@asynccontextmanager
async def full(runtime: MicroVMRuntime, monkeypatch: pytest.MonkeyPatch, *ids: str) -> AsyncIterator[None]:
    """Each guest stands still before its agent can answer; it takes not long to notice."""

    async def link(*arguments: object, **named: object) -> LinkAgent:
        _held[:] = [runtime.host.instances[name] for name in ids if name in runtime.host.instances]
        return await _never(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(bringup, "open_agent", link)
        began = time.monotonic()
        yield
        assert time.monotonic() - began < QUICK


async def test_a_start_from_memory_is_told_at_once(
    runtime: MicroVMRuntime, base: Rootfs, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await runtime.create(SandboxSpec("source", base, SMALL, hostname="source"))
    layer = settings.paths.state / "stalls"
    await instance.commit(layer, memory=True, durable=False)
    try:
        stack = replace(base, layers=[layer, *base.layers])
        async with full(runtime, monkeypatch, "new"):
            with pytest.raises(CreateFailed, match="no room for what it writes; free space") as caught:
                await runtime.create(SandboxSpec("new", base, SMALL, hostname="new"))
            assert caught.value.stage == "disk"
        async with full(runtime, monkeypatch, "fork"):
            with pytest.raises(CreateFailed, match="no room for what it writes"):
                await runtime.create(SandboxSpec("fork", stack, SMALL, hostname="fork", memory=layer))
        assert await runtime.list() == ["source"]
        # It runs already, and is told who it is.
        monkeypatch.setattr(restore.Restorer, "_introduce", _introduced)
        with pytest.raises(CreateFailed, match="no room for what it writes"):
            await asyncio.wait_for(runtime.create(SandboxSpec("new", base, SMALL, hostname="new")), QUICK)
        monkeypatch.undo()
        assert await runtime.list() == ["source"]
        fork = await runtime.create(SandboxSpec("fork", stack, SMALL, hostname="fork", memory=layer))
        assert await Kit(runtime, base, fork).output("hostname") == "fork"
    finally:
        image.remove(layer)
        layer.unlink()


async def _introduced(_: object, instance: MicroVMInstance, __: SandboxSpec) -> None:
    stalled(instance)
    await asyncio.sleep(600)


async def test_a_boot_is_told_at_once(runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a base, and what is made of it."""
    other = Resources(memory_mb=96, disk_mb=64, pids=64)

    async def link(*arguments: object, **named: object) -> LinkAgent:
        _held[:] = list(runtime.host.instances.values())
        return await _never(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(bringup, "open_agent", link)
        with pytest.raises(CreateFailed, match="no room for what it writes") as caught:
            await asyncio.wait_for(runtime.create(SandboxSpec("boots", base, other, hostname="boots")), QUICK)
    assert caught.value.stage == "disk"
    assert await runtime.list() == []
    assert [path.name for path in runtime.host.layout.bases.glob(".*") if path.is_dir()] == []


async def test_a_resume_is_told_at_once_and_can_be_tried_again(
    runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SandboxSpec("again", base, SMALL, hostname="again")
    instance = await runtime.create(spec)
    await Kit(runtime, base, instance).output("echo kept > /root/kept; sync")
    await runtime.suspend("again")
    async with full(runtime, monkeypatch, "again"):
        with pytest.raises(CreateFailed, match="no room for what it writes"):
            await runtime.wake(spec)
    assert await runtime.suspended() == ["again"]
    woken = await runtime.wake(spec)
    assert isinstance(woken, MicroVMInstance)
    assert await Kit(runtime, base, woken).output("cat /root/kept") == "kept"
    # One that stood still with its memory in place: neither this nor its end waits for its agent.
    await woken.pause()
    monkeypatch.setattr(LinkAgent, "identify", _identified(woken))
    monkeypatch.setattr(LinkAgent, "stand_still", _identified(woken))
    with pytest.raises(HostFull, match="no room"):
        await asyncio.wait_for(woken.resume(), 5)
    monkeypatch.undo()
    assert woken.paused
    await woken.resume()
    assert await Kit(runtime, base, woken).output("cat /root/kept") == "kept"


def _identified(instance: MicroVMInstance) -> object:
    async def answer(*_: object, **__: object) -> None:
        stalled(instance)
        await asyncio.sleep(600)

    return answer
