"""`SessionServer`: opens sessions and jobs on one fork server, and knows how each of them ended."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from sandyard.envs.base import Execution
from sandyard.envs.process.control import ForkServerProcess
from sandyard.envs.process.lease import Ended, Lease
from sandyard.envs.process.limits import WARM_IMPORTS, SessionLimits
from sandyard.envs.process.pump import OutputPump
from sandyard.envs.process.session import ProcessSession
from sandyard.errors import CapacityError, CreateFailed

_AT_ONCE = 4  # sessions being opened: more only wait for each other in the kernel
_OPEN_TIMEOUT = 30.0
_JOB_OUTPUT = 4 << 20


class SessionServer:
    """A fork server, started with the first session. Use it on one event loop, as a context or with `close`.

    `packages`: top-level packages of this environment that programs may import beyond the standard library;
    `imports` are loaded once for all sessions. Raises `HostError` where the host does not let us confine.
    """

    def __init__(
        self,
        limits: SessionLimits = SessionLimits(),
        *,
        packages: Sequence[str] = (),
        imports: Sequence[str] = WARM_IMPORTS,
    ) -> None:
        self.limits = limits
        self._packages, self._imports = tuple(packages), tuple(imports)
        self._process: ForkServerProcess | None = None
        self._numbers = itertools.count(1)
        self._endings: dict[int, asyncio.Future[Ended]] = {}
        self._starting = asyncio.Lock()
        self._opening = asyncio.Semaphore(_AT_ONCE)
        self._sessions: set[ProcessSession] = set()
        self._stopping: set[asyncio.Task[None]] = set()

    async def open(self) -> ProcessSession:
        """A new session. Raises `CreateFailed` naming the stage, `CapacityError`, `HostError`."""
        return ProcessSession(
            self._lease_session, await self._lease_session(), self.limits.output_limit, self._sessions
        )

    async def start(self) -> str:
        """Start the fork server now; returns what confines less than it could on this host, or nothing."""
        return (await self._started()).groups.missing

    @property
    def live(self) -> int:
        """How many sessions and jobs there are."""
        return len(self._endings)

    async def run_job(self, program: str, stdin: bytes, timeout: float) -> Execution:
        """Run a program of ours once, in namespaces of its own and as their root without powers but those to
        change user ids and to kill. It finds `stdin` on its standard input. Needs root."""
        started = time.monotonic()
        source = program.encode()
        data = len(source).to_bytes(4, "big") + source + stdin
        with OutputPump(_JOB_OUTPUT) as pump:
            reader, writer = socket.socketpair()
            with reader, writer:
                number, ended = await self._ask("job", [reader.fileno(), *pump.writers])
                reader.close()
                pump.close_writers()
                try:
                    async with asyncio.timeout(timeout):
                        await _feed(writer, data)
                        how = await asyncio.shield(ended)
                    timed_out = False
                except TimeoutError:
                    how, timed_out = Ended(None), True
                finally:
                    if not ended.done():
                        await self._kill(number, ended)
            pump.drain()
            code = how.code if how.code is not None and how.code >= 0 else None
            duration = time.monotonic() - started
            return pump.tap.execution(None if timed_out else code, timed_out=timed_out, duration=duration)

    async def close(self) -> None:
        """End all sessions. The next `open` starts anew."""
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                self._all_ended()
                await process.stop()
        await asyncio.gather(*(session.close() for session in list(self._sessions)), *self._stopping)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _lease_session(self) -> Lease:
        async with self._opening:
            link, theirs = socket.socketpair()
            number, ended = 0, None
            try:
                with theirs:
                    number, ended = await self._ask("session", [theirs.fileno()])
                link.setblocking(False)
                lease = Lease(link, ended, lambda: self._signal("interrupt", number), lambda: self._kill(number, ended))
                async with asyncio.timeout(_OPEN_TIMEOUT):
                    await lease.ready()
                return lease
            except BaseException as error:
                link.close()
                if ended is not None:
                    await self._kill(number, ended)
                if isinstance(error, TimeoutError):
                    raise CreateFailed("confinement", f"it takes longer than {_OPEN_TIMEOUT:g} s") from error
                raise

    async def _ask(self, kind: str, descriptors: Sequence[int]) -> tuple[int, asyncio.Future[Ended]]:
        process = await self._started()
        number = next(self._numbers)
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._endings[number] = ended
        try:
            await process.send({"op": kind, "id": number}, descriptors)
        except BaseException as error:
            self._endings.pop(number, None)
            if isinstance(error, ConnectionError):
                raise CreateFailed("fork", "the fork server has ended") from error
            raise
        return number, ended

    async def _started(self) -> ForkServerProcess:
        async with self._starting:
            if self._process is None:
                self._process = await ForkServerProcess.start(
                    self.limits, self._packages, self._imports, self._on_message
                )
            return self._process

    async def _signal(self, what: str, number: int) -> None:
        if self._process is not None and number in self._endings:
            try:
                await self._process.send({"op": what, "id": number})
            except ConnectionError:
                return  # it has ended, and everything with it

    async def _kill(self, number: int, ended: asyncio.Future[Ended] | None) -> Ended:
        """End one, and return when nothing of it is left."""
        assert ended is not None
        if not ended.done():
            await self._signal("kill", number)
        return await asyncio.shield(ended)

    def _on_message(self, message: dict[str, Any] | None) -> None:
        if message is None:
            self._process_ended()
        elif "ended" in message:
            code = os.waitstatus_to_exitcode(message["status"])
            self._one_ended(message["ended"], Ended(code, message["memory"], message["left"]))
        elif "refused" in message:
            ended = self._endings.pop(message["refused"], None)
            if ended is not None:
                ended.set_exception(CapacityError(f"no room for a session: {message['reason']}", retry_after=1.0))
                ended.exception()  # whoever waits for the session asks for it

    def _one_ended(self, number: int, how: Ended) -> None:
        ended = self._endings.pop(number, None)
        if ended is not None and not ended.done():
            ended.set_result(how)

    def _all_ended(self) -> None:
        for number in list(self._endings):
            self._one_ended(number, Ended(None))

    def _process_ended(self) -> None:
        process, self._process = self._process, None
        self._all_ended()
        if process is not None:
            # Reaped off the loop; the next session finds a new fork server.
            task = asyncio.ensure_future(process.stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)


async def _feed(writer: socket.socket, data: bytes) -> None:
    writer.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_sendall(writer, data)
        writer.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError):
        return  # it ended without reading all of it; its exit code tells
