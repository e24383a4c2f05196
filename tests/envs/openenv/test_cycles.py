"""Many sessions one after another leave a worker, its parent and a client as they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandyard.envs.openenv.client import OpenEnvClient
from sandyard.envs.openenv.server import OpenEnvServer
from tests.envs.openenv.probes import RESET, Caller, raw, serving, until

_WARM = 40


def held(pid: int | str) -> tuple[int, int]:
    """Descriptors and threads of a process."""
    root = Path(f"/proc/{pid}")
    return len(list((root / "fd").iterdir())), len(list((root / "task").iterdir()))


def resident(pid: int | str) -> int:
    """KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


async def cycle(server: OpenEnvServer, number: int) -> None:
    """Every third one leaves without a word, every fourth is through our client, every fifth is kept over HTTP."""
    if number % 5 == 0:
        http = Caller(server)
        name = await http.create()
        async with raw(server, f"/ws?session_id={name}") as client:
            await client.ask(RESET)
            assert (await http.say(name, "x"))["result"]["data"] == "x"
        await http.ask("openenv/session/close", session_id=name)
        return
    if number % 4 == 0:
        async with OpenEnvClient(server.url) as env:
            await env.reset()
            await env.step("echo", {"message": "x"})
        return
    async with raw(server) as client:
        await client.ask(RESET)
        await client.ask({"type": "step", "data": {"message": "x"}})
        if number % 3:
            await client.send({"type": "close"})
            await client.socket.wait_closed()
        else:
            client.socket.transport.abort()


async def run_cycles(count: int) -> tuple[int, int]:
    """KiB by which worker and parent grew."""
    async with serving("echo") as server:
        (pid,) = server.worker_pids
        for number in range(_WARM):
            await cycle(server, number)
        await until(lambda: server.active_sessions == 0)
        await asyncio.sleep(0.2)
        before = (*held(pid), *held("self"))
        memory = resident(pid), resident("self")
        for number in range(count):
            await cycle(server, number)
        await until(lambda: server.active_sessions == 0)
        await until(lambda: all(now <= then for now, then in zip((*held(pid), *held("self")), before, strict=True)))
        return resident(pid) - memory[0], resident("self") - memory[1]


async def test_cycles_leave_descriptors_and_threads_flat() -> None:
    worker, _ = await run_cycles(200)
    assert worker < 4096


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_two_thousand_cycles_leave_memory_flat() -> None:
    worker, parent = await run_cycles(2000)
    assert worker < 4096
    assert parent < 8192
