"""What is left of Ray when the process that pooled ends, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.envs.pool.conftest import our_environment, ray_processes, wait_for_no

pytestmark = pytest.mark.timeout(360)
_IN_USE = """
import asyncio
from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.pool import EnvPool
from sandyard.envs.pool.ray import SESSION_TOKEN
from sandyard.envs.pool.settings import PoolSettings

async def main():
    factory = EnvFactory("sandyard.envs.embedded.echo:EchoEnv")
    async with EnvPool(factory, PoolSettings(size=2, workers=2, remote=True)) as pool:
        await pool.reset_batch([None, None])
        print(SESSION_TOKEN, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def _pooling() -> tuple[subprocess.Popen[bytes], str]:
    """A process that holds a pool of two workers, and its token."""
    child = subprocess.Popen(
        [sys.executable, "-c", _IN_USE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=our_environment()
    )
    assert child.stdout is not None
    token = child.stdout.readline().decode().strip()
    assert len(ray_processes(token, b"ShardActor")) == 2
    return child, token


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGINT)
    _wait(child)


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Its output is not waited for: what outlives it may hold the other end."""
    child.wait(timeout=90)
    assert child.stdout is not None
    child.stdout.close()


def test_a_killed_process_takes_its_workers_along_and_the_next_one_sweeps_and_leaves_nothing() -> None:
    child, token = _pooling()
    child.kill()
    _wait(child)
    wait_for_no(lambda: ray_processes(token, b"ShardActor"), 90)
    assert list(Path("/tmp").glob(f"sy-ray-{child.pid}-*"))
    later, token = _pooling()
    _end(later)
    wait_for_no(lambda: ray_processes(token), 60)
    assert not [path for each in (child, later) for path in Path("/tmp").glob(f"sy-ray-{each.pid}-*")]
