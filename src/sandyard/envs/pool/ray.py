"""Workers as Ray actors: one process each, on this machine or on the cluster this process is connected to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sandyard.envs.factory import EnvFactory
from sandyard.envs.pool.base import Worker, WorkerLost
from sandyard.envs.pool.messages import Opened, unpack
from sandyard.envs.pool.shard import Shard
from sandyard.errors import CapacityError, HostError

_START_TIMEOUT = 120.0
_OBJECT_STORE = 80 << 20  # bytes, near Ray's least: what passes here is small and passes inline
_GRACE = 5.0  # seconds that an answer about closing may take beyond the closing itself
T = TypeVar("T")


# What Ray's processes find in their environment: nobody is told of our use.
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# And nobody else gets in. Ray reads this once in a process, when it is imported.
SESSION_TOKEN = secrets.token_hex(32)
_GUARDED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": SESSION_TOKEN}
_PREFIX, _PLACE = "sy-ray", "/tmp"


def load_ray() -> Any:
    """The package. Raises `HostError` where it is not installed."""
    if "ray" not in sys.modules:
        _SETTINGS.update(_GUARDED)
    try:
        with _environment():
            import ray
    except ImportError as error:
        raise HostError(
            "ENV_REMOTE needs Ray", remedy="pip install 'sandyard[pool]', or unset ENV_REMOTE to run in this process"
        ) from error
    return ray


class RayRuntime:
    """Ray for as long as pools use it. Where this process is connected to a cluster, that one, left as it is;
    else one of our own: on loopback, without a dashboard, its files in a directory that goes with it."""

    _lock = threading.Lock()
    _users = 0
    _directory: str | None = None

    @classmethod
    def acquire(cls, cpus: int) -> None:
        """Blocks for some seconds where Ray has to be started: its processes die with the thread that starts them,
        so that it cannot be another one. Raises `HostError`."""
        ray = load_ray()
        with cls._lock:
            if not ray.is_initialized():
                cls._directory = _start(ray, cpus)
            cls._users += 1

    @classmethod
    def cpus_of_worker(cls) -> int:
        """What a worker asks of Ray: a place among others on a cluster; on a Ray of our own nobody else is there."""
        return 0 if cls._directory is not None else 1

    @classmethod
    def release(cls) -> None:
        ray = load_ray()
        with cls._lock:
            cls._users -= 1
            if cls._users == 0 and cls._directory is not None:
                directory, cls._directory = cls._directory, None
                try:
                    ray.shutdown()
                finally:
                    shutil.rmtree(directory, ignore_errors=True)


def _start(ray: Any, cpus: int) -> str:
    _sweep()
    # Sockets are in it, whose paths must be short.
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-", dir=_PLACE)
    try:
        with _environment(), _signal_handlers():
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE,
                log_to_driver=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=directory,
            )
    except BaseException as error:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, Exception):
            raise HostError(f"Ray did not start: {error}", remedy="unset ENV_REMOTE to run in this process") from error
        raise
    return directory


def _sweep() -> None:
    """Remove directories of processes that were killed. What Ray had running for them ends by itself: the
    workers within seconds, its own agents within about a minute."""
    for folder in Path(_PLACE).glob(f"{_PREFIX}-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdigit() and not Path("/proc", pid).exists() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself; it stays with whom it was."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


class ShardActor(Shard):
    """A shard in a process of Ray's, on one event loop."""


class RayWorker(Worker):
    """An actor. Made by `start`."""

    def __init__(self, actor: Any, opened: Opened, close_timeout: float) -> None:
        self._actor = actor
        self.opened = opened
        self._close_timeout = close_timeout

    @classmethod
    async def start(cls, factory: EnvFactory, slots: Sequence[int], close_timeout: float) -> RayWorker:
        """Raises `CapacityError` where Ray finds no CPU for it in time, `WorkerLost`."""
        ray = load_ray()
        cpus = RayRuntime.cpus_of_worker()
        options = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4 * len(slots) + 8}
        actor = ray.remote(ShardActor).options(**options).remote(factory, list(slots), close_timeout)
        try:
            opened = await _answer(actor.open.remote(), _START_TIMEOUT)
        except BaseException as error:
            ray.kill(actor)
            if isinstance(error, TimeoutError):
                raise CapacityError(
                    f"Ray started no worker in {_START_TIMEOUT:g} s", remedy="lower ENV_NUM_WORKERS or add CPUs to Ray"
                ) from error
            raise
        return cls(actor, unpack(opened), close_timeout)

    async def call(self, slot: int, request: bytes) -> bytes:
        reply: bytes = await _answer(self._actor.call.remote(slot, request))
        return reply

    async def release(self, slot: int) -> None:
        await self._end(self._actor.release.remote(slot), self._close_timeout + _GRACE)

    async def drop(self, slot: int) -> None:
        # What runs there may be slow to end, then its env to close: each has its time.
        await self._end(self._actor.drop.remote(slot), 2 * self._close_timeout + _GRACE)

    async def close(self) -> None:
        await self._end(self._actor.close.remote(), 2 * self._close_timeout + _GRACE)

    def kill(self) -> None:
        ray = load_ray()
        if ray.is_initialized():
            ray.kill(self._actor)

    async def _end(self, reference: Awaitable[None], patience: float) -> None:
        try:
            await _answer(reference, patience)
        except TimeoutError as error:
            raise WorkerLost(f"the worker did not answer within {patience:g} s") from error


async def _answer(reference: Awaitable[T], timeout: float | None = None) -> T:
    """Raises `WorkerLost` for what Ray says of an actor that is gone, and `TimeoutError`."""
    from ray.exceptions import RayError, RayTaskError

    try:
        async with asyncio.timeout(timeout):
            return await reference
    except RayTaskError:
        raise
    except RayError as error:
        raise WorkerLost(f"the worker is gone: {type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
