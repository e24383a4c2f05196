"""A host process that is killed: its sessions end, and what it could not remove the next one does."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from sandyard.envs.process.cgroups import _roots
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.server import SessionServer

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]
_HOST = """
import asyncio
from sandyard.envs.process.server import SessionServer
async def main():
    server = SessionServer()
    await server.start()
    session = await server.open()
    print((await session.run("import os; print('ready', flush=True)")).stdout.strip(), flush=True)
    await session.run("while True: pass", 600)
asyncio.run(main())
"""


def _groups() -> set[Path]:
    roots = dict.fromkeys(_roots(Path("/proc/self/mountinfo")).values())
    return {path for root in roots for path in root.glob("sandyard-process-*")}


def _members(groups: set[Path]) -> list[str]:
    return [line for group in groups for file in group.rglob("cgroup.procs") for line in file.read_text().split()]


async def test_its_sessions_die_with_it_and_the_next_one_sweeps() -> None:
    before = _groups()
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", _HOST, stdout=asyncio.subprocess.PIPE)
    assert host.stdout is not None
    assert await asyncio.wait_for(host.stdout.readline(), 60) == b"ready\n"
    left = _groups() - before
    if not left:
        pytest.skip("no control groups here")
    assert _members(left)
    host.send_signal(signal.SIGKILL)
    await host.wait()
    async with asyncio.timeout(20):
        while _members(left):  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.05)
    async with SessionServer(SessionLimits(memory_mb=256)) as server:
        await server.start()
        assert not left & _groups()
