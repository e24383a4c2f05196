"""The OpenEnv server: one parent that accepts and places, workers that serve.

The parent looks at the first line of a connection without taking it, so that it knows a session from
a question, and hands the socket to the worker with the fewest sessions: none is refused while any
worker has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import socket
from dataclasses import dataclass, field
from typing import Any, Self

from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.hands import WorkerHandle
from sandyard.errors import ConfigError, HostError, SandyardError

logger = logging.getLogger(__name__)
_HELLO_TIMEOUT = 10.0
_LINE_LIMIT = 2048
_BACKLOG = 1024
_RESPAWN_PAUSE = 1.0
_HELD_LINES = (b"POST /mcp ", b"POST /mcp?")
_JOINING = re.compile(rb"GET /ws\?(\S*&)?session_id=")
_SESSION_LINES = (b"GET /ws ", b"GET /ws?", b"GET /mcp ", b"GET /mcp?")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Seconds and bytes. `max_sessions` is per worker. `port` 0 takes a free one."""

    spec: EnvSpec = field(default_factory=EnvSpec)
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 4
    max_sessions: int = 64
    idle_timeout: float = 1800.0
    step_timeout: float = 300.0
    ping_interval: float = 20.0
    drain: float = 10.0
    max_message: int = 16 << 20

    def __post_init__(self) -> None:
        for name in ("workers", "max_sessions", "idle_timeout", "step_timeout", "ping_interval", "max_message"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")

    def for_worker(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_json(),
            "idle_timeout": self.idle_timeout,
            "step_timeout": self.step_timeout,
            "max_sessions": self.max_sessions,
            "ping_interval": self.ping_interval,
            "max_message": self.max_message,
        }


class OpenEnvServer:
    """`async with OpenEnvServer(options) as server`: serves at `server.url`; leaving it stops gracefully.

    Starting raises `ConfigError` when the env cannot be made and `HostError` when the address is taken.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._workers: list[WorkerHandle] = []
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    @property
    def url(self) -> str:
        assert self._listener is not None, "the server is not started"
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def active_sessions(self) -> int:
        return sum(len(worker.seats) for worker in self._workers)

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    async def __aenter__(self) -> Self:
        self._listener = self._listen()
        try:
            starts = [WorkerHandle.start(self.options.for_worker()) for _ in range(self.options.workers)]
            results = await asyncio.gather(*starts, return_exceptions=True)
            self._workers = [found for found in results if isinstance(found, WorkerHandle)]
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            await self.stop()
            raise
        for worker in self._workers:
            self._spawn(self._tend(worker))
        self._spawn(self._accept(self._listener))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Take no more connections, let workers finish what they were asked, end them. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._listener is not None:
            self._listener.close()
        await asyncio.gather(*(worker.stop(self.options.drain) for worker in self._workers))
        self._workers = []

    def _listen(self) -> socket.socket:
        try:
            found = socket.create_server(
                (self.options.host, self.options.port),
                family=socket.AF_INET6 if ":" in self.options.host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            where = f"{self.options.host}:{self.options.port}"
            raise HostError(f"cannot listen on {where}: {error.strerror or error}", remedy="choose another") from error
        found.setblocking(False)
        return found

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the client is gone: the next may do better
                logger.warning("accept: %s", error)
                await asyncio.sleep(0.05)
                continue
            self._spawn(self._place(connection))

    async def _place(self, connection: socket.socket) -> None:
        """Hand a connection over once its first line tells what it is. Ours is a copy and is closed in any case."""
        with connection:
            connection.setblocking(False)
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT):
                    line = await _peek_line(connection)
            except (TimeoutError, OSError):
                return
            held = line.startswith(_HELD_LINES) or _JOINING.match(line) is not None
            session = line.startswith(_SESSION_LINES) and not held
            by_load = sorted(self._workers, key=lambda worker: len(worker.seats))
            # Nothing in a first line names the session of a call: those over HTTP all live in one worker.
            for worker in self._workers[:1] if held else by_load:
                refused = None
                if session and len(worker.seats) >= self.options.max_sessions:
                    refused = (self.active_sessions, self.options.workers * self.options.max_sessions)
                counts = session and refused is None
                if worker.hand(next(self._numbers), connection, refused, counts=counts):
                    return
            logger.warning("no worker takes a connection")
            with contextlib.suppress(OSError):
                connection.send(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")

    async def _tend(self, worker: WorkerHandle) -> None:
        """Replace a worker that died: its sessions are lost, and nobody else's."""
        while True:
            code = await worker.process.wait()
            logger.error("worker %s ended with %s; %s sessions are lost", worker.process.pid, code, len(worker.seats))
            self._workers.remove(worker)
            worker.forget()
            worker = await self._replace()

    async def _replace(self) -> WorkerHandle:
        while True:
            try:
                worker = await WorkerHandle.start(self.options.for_worker())
            except (SandyardError, OSError) as error:
                logger.error("a worker did not start: %s", error)
                await asyncio.sleep(_RESPAWN_PAUSE)
                continue
            self._workers.append(worker)
            return worker


async def _peek_line(connection: socket.socket) -> bytes:
    """The beginning of a connection, left to be read: its first line, or what came of a long one."""
    while True:
        with contextlib.suppress(BlockingIOError):
            seen = connection.recv(_LINE_LIMIT, socket.MSG_PEEK)
            if not seen or b"\r\n" in seen or len(seen) >= _LINE_LIMIT:
                return seen
            # More is wanted, but the socket stays readable: waiting for that would spin.
            await asyncio.sleep(0.02)
            continue
        await _wait_readable(connection)


async def _wait_readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _mark, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


def _mark(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
