"""Memory of a real guest taken while its link is busy both ways: what was made of it goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.guest import Process
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)


@asynccontextmanager
async def busy(instance: MicroVMInstance, process: Process) -> AsyncIterator[list[int]]:
    """Output is read, files are sent and questions asked all the while; how often each came through."""
    counts = [0, 0, 0]

    async def read() -> None:
        async for _ in process.output():
            counts[0] += 1

    async def send() -> None:
        while True:
            await instance.agent.write_file("/dev/shm/sent", bytes(1 << 18))
            counts[1] += 1

    async def ask() -> None:
        while True:
            await instance.agent.use()
            counts[2] += 1

    tasks = [asyncio.ensure_future(work()) for work in (read, send, ask)]
    try:
        yield counts
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError | SandboxError) for each in ended), ended


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.full)])
async def test_snapshots_and_pauses_under_traffic_can_be_restored(
    runtime: MicroVMRuntime, settings: Settings, base: Rootfs, times: int
) -> None:
    layers = settings.paths.state / "layers"
    shutil.rmtree(layers, ignore_errors=True)
    layers.mkdir()
    spec = SandboxSpec("busy", base, SMALL, hostname="busy")
    instance = await runtime.create(spec)
    assert isinstance(instance, MicroVMInstance)
    process = await Kit(runtime, base, instance).start("while :; do echo $RANDOM$RANDOM$RANDOM; done")
    async with busy(instance, process) as counts:
        for count in range(times):
            before = list(counts)
            layer = layers / f"layer{count}"
            await instance.commit(layer, memory=True, durable=False)
            copy = replace(
                spec,
                sandbox_id="copy",
                rootfs=replace(base, layers=[layer, *base.layers]),
                memory=layer,
                hostname="copy",
            )
            assert await Kit(runtime, base, await runtime.create(copy)).output("hostname") == "copy"
            await runtime.destroy("copy")
            async with asyncio.timeout(60):
                while any(now <= then for now, then in zip(counts, before, strict=True)):  # noqa: ASYNC110 – traffic, not an event
                    await asyncio.sleep(0.05)
        await runtime.suspend("busy")
    woken = Kit(runtime, base, await runtime.wake(spec))
    assert process.pid in await woken.agent.processes()
