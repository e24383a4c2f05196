"""The Ray that a pool starts: who can reach it, what it changes here, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.pool.ray import RayRuntime
from sandyard.envs.pool.settings import PoolSettings
from tests.envs.pool.conftest import our_environment, ray_processes, wait_for_no
from tests.envs.pool.probes import ProbeEnv

pytestmark = pytest.mark.timeout(120)
_WITHOUT_RAY = """
import asyncio, sys
sys.modules["ray"] = None
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.pool.settings import PoolSettings

async def main(remote):
    factory = EnvFactory("sandyard.envs.embedded.echo:EchoEnv")
    async with EnvPool(factory, PoolSettings(size=2, remote=remote)) as pool:
        print([result.status.value for result in await pool.reset_batch([None, None])])

asyncio.run(main(False))
asyncio.run(main(True))
"""


def _listeners(pids: set[int]) -> list[str]:
    """Addresses (hexadecimal, as the kernel shows them) on which processes listen for TCP."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue  # closed meanwhile
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in inodes]


async def test_it_listens_on_loopback_and_changes_nothing_here(ray_up: None) -> None:
    environ, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    async with EnvPool(EnvFactory.of(ProbeEnv), PoolSettings(size=2, workers=2, remote=True)) as pool:
        assert {pid for pid in pool.pids() if pid} <= ray_processes()
        addresses = _listeners(ray_processes())
        assert addresses
        assert all(address in ("0100007F", "0000000000000000FFFF00000100007F") for address in addresses)
        assert not [name for name in os.environ if name.startswith("RAY_") and name not in environ]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert handler is not None
    assert "ray" not in getattr(handler, "__module__", "")


async def test_pools_share_one(ray_up: None) -> None:
    settings = PoolSettings(size=3, workers=3, remote=True)
    async with (
        EnvPool(EnvFactory.of(ProbeEnv), settings) as first,
        EnvPool(EnvFactory.of(ProbeEnv), settings) as second,
    ):
        assert len({*first.pids(), *second.pids()}) == 6
        assert RayRuntime.cpus_of_worker() == 0
        await first.close()
        assert [r.observation for r in await second.reset_batch([None] * 3)] == [""] * 3
    await asyncio.to_thread(wait_for_no, lambda: ray_processes(title=b"ShardActor"), 20)


def test_without_ray_a_pool_is_local_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_RAY], capture_output=True, text=True, env=our_environment(), timeout=60
    )
    assert done.stdout == "['ok', 'ok']\n"
    assert "HostError: ENV_REMOTE needs Ray; pip install 'sandyard[pool]', or unset ENV_REMOTE" in done.stderr
