"""What sandboxes and host share in the kernel: no sandbox can take it from the others."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import AsyncIterator

import pytest

from sandyard.config import ContainerSettings, Settings
from sandyard.guest.base import Process, ProcessSpec
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container import ContainerRuntime
from sandyard.runtimes.container.choice import find_engines
from sandyard.runtimes.container.shared import INOTIFY_INSTANCES

pytestmark = pytest.mark.root
SMALL = Resources(cpu=1.0, memory_mb=128, disk_mb=16, pids=32)
TAKE_ALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
taken = 0
while taken < 100_000 and libc.inotify_init() >= 0:
    taken += 1
print(taken, flush=True)
os.read(0, 1)
"""


async def first_line(process: Process) -> str:
    async for _, data in process.output():
        return data.decode().strip()
    return ""


async def create(runtime: ContainerRuntime, base: Rootfs) -> Instance:
    name = f"share{secrets.token_hex(4)}"
    return await runtime.create(SandboxSpec(name, base, SMALL, name))


@pytest.fixture(params=["crun", "runc"])
async def engine(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[ContainerRuntime]:
    chosen = ContainerSettings(engine=request.param)
    if not find_engines(chosen):
        pytest.skip(f"{request.param} is not here")
    runtime = ContainerRuntime(settings.model_copy(update={"container": chosen}))
    yield runtime
    for sandbox_id in await runtime.list():
        await runtime.destroy(sandbox_id)
    await runtime.close()


async def test_a_sandbox_cannot_take_every_inotify_instance(engine: ContainerRuntime, base: Rootfs) -> None:
    greedy, other = await create(engine, base), await create(engine, base)
    process = await greedy.agent.spawn(ProcessSpec(["python3", "-c", TAKE_ALL], user="user", stdin=True))
    assert int(await first_line(process)) <= INOTIFY_INSTANCES
    descriptor = ctypes.CDLL(None).inotify_init()
    assert descriptor >= 0, "the host has no inotify instance left"
    os.close(descriptor)
    watch = await other.agent.watch("/tmp")
    await watch.close()


async def test_host_wide_asynchronous_io_is_not_offered(engine: ContainerRuntime, base: Rootfs) -> None:
    box = await create(engine, base)
    script = "import ctypes, os; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(%d, 8, ctypes.byref("
    script += "ctypes.c_ulong(0))), os.strerror(ctypes.get_errno()))"
    number = {"x86_64": 206, "aarch64": 0}[os.uname().machine]
    process = await box.agent.spawn(ProcessSpec(["python3", "-c", script % number]))
    assert await first_line(process) == "-1 Function not implemented"
