"""Processes and who listens to them.

A process outlives the request that started it. Its output goes to whoever listens now and is not
replayed. A single listener that does not read holds the process back; with several, one that does
not read for `STALL_SECONDS` is cut off, so that it cannot hold up the others; with none, output is
dropped. An ended process can be connected to for `KEPT_SECONDS` more; of the last `KEPT_ENDED` of
them no more is held than how they ended.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from sandyard.errors import SandyardError
from sandyard.guest.base import Agent, Channel, ExitStatus, Process
from sandyard.server.envd.connect import RpcError, end_frame, frame
from sandyard.server.envd.memory import MemoryWatch

log = structlog.get_logger("sandyard.envd")

QUEUE_BYTES = 256 * 1024
STALL_SECONDS = 10.0
KEPT_SECONDS = 30.0
KEPT_ENDED = 512
SIGKILL_SECONDS = 2.0
LINK_GRACE_SECONDS = 1.0

KEEPALIVE = frame(b'{"event":{"keepalive":{}}}')
DEADLINE = end_frame(RpcError("deadline_exceeded", "the deadline of the call has passed"))
_DATA = {channel: b'{"event":{"data":{"%s":"' % channel.value.encode() for channel in Channel}


def data_frame(channel: Channel, data: bytes) -> bytes:
    return frame(_DATA[channel] + base64.b64encode(data) + b'"}}}')


def exit_frame(status: ExitStatus, oom: str | None = None) -> bytes:
    """The event that ends a process. `oom` says why the kernel took it or a child of it, if it did."""
    if status.signal is not None:
        name = (signal.strsignal(status.signal) or f"signal {status.signal}").lower()
        end: dict[str, Any] = {"exitCode": -1, "exited": False, "status": f"signal: {name}", "error": f"signal: {name}"}
    else:
        end = {"exitCode": status.code, "exited": True, "status": f"exit status {status.code}"}
        if status.code:
            end["error"] = end["status"]
    if oom is not None:
        end["error"] += f" ({oom})"
    return frame(json.dumps({"event": {"end": end}}).encode())


class Subscriber:
    """A bounded queue of frames between a process and one listener."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._size = 0
        self._end: bytes | None = None
        self._wake: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self.aborted = False
        self.closed = False

    @property
    def full(self) -> bool:
        return self._size >= QUEUE_BYTES and not self.closed

    def push(self, data: bytes) -> None:
        if self._end is None and not self.closed:
            self._frames.append(data)
            self._size += len(data)
            _resolve(self._wake)

    def finish(self, last: bytes) -> None:
        """Nothing comes after `last`. Only the first call counts."""
        if self._end is None:
            self._end = last
            _resolve(self._wake)

    def abort(self) -> None:
        self.aborted = True
        self.close()

    def close(self) -> None:
        """The listener is gone, or must go."""
        self.closed = True
        _resolve(self._wake)
        _resolve(self._room)

    async def room(self, seconds: float) -> bool:
        """Wait for room, at most so long; whether there is some."""
        if self.full:
            self._room = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._room], timeout=seconds)
        return not self.full

    async def next(self) -> tuple[bytes, bool]:
        """What came since the last call, joined, and whether it was the last."""
        if not self._frames and self._end is None and not self.closed:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None
        data = self._frames[0] if len(self._frames) == 1 else b"".join(self._frames)
        self._frames.clear()
        self._size = 0
        _resolve(self._room)
        if self.closed:
            return b"", True
        return (data, False) if self._end is None else (data + self._end, True)


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


class Session:
    """A process, its description as its starter gave it, and its listeners."""

    def __init__(self, process: Process, config: Mapping[str, Any], tag: str | None) -> None:
        self.pid = process.pid
        self.config = config
        self.tag = tag
        self._process: Process | None = process
        self.ended: bytes | None = None  # the frames that end a stream, once it has
        self.on_exit: Callable[[ExitStatus], None] = lambda _status: None
        self._subscribers: list[Subscriber] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._killing: asyncio.Task[None] | None = None

    @property
    def process(self) -> Process:
        """Raises `RpcError(not_found)` once it has ended."""
        if self._process is None:
            raise RpcError("not_found", f"process with pid {self.pid} has ended")
        return self._process

    def start(self, sessions: Sessions, deadline: float | None = None) -> None:
        """Begin to read output. In `deadline` seconds the process is killed, whoever listens."""
        self._task = asyncio.create_task(self._pump(sessions))
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_later(deadline, self._expire)

    def subscribe(self) -> Subscriber:
        subscriber = Subscriber()
        if self.ended is not None:
            subscriber.finish(self.ended)
        else:
            self._subscribers.append(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        subscriber.close()
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def abort(self) -> None:
        for subscriber in self._subscribers:
            subscriber.abort()
        if self._task is not None:
            self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        for subscriber in self._subscribers:
            subscriber.finish(DEADLINE)
        self._killing = asyncio.create_task(self._kill_expired())

    async def _kill_expired(self) -> None:
        try:
            await self.kill()
        except (SandyardError, RpcError) as error:
            log.info("nothing to kill at the deadline", pid=self.pid, error=str(error))

    async def kill(self) -> None:
        """SIGKILL to the whole tree; returns when the process is gone (or after two seconds)."""
        process = self.process
        await process.signal(signal.SIGKILL)
        try:
            async with asyncio.timeout(SIGKILL_SECONDS):
                await process.wait()
        except TimeoutError:
            log.warning("a killed process has not gone yet", pid=self.pid)

    async def _pump(self, sessions: Sessions) -> None:
        process = self.process
        try:
            async for channel, data in process.output():
                if self._subscribers:
                    await self._publish(data_frame(channel, data))
            status = await process.wait()
            self.on_exit(status)
            end = exit_frame(status, await sessions.oom(status)) + end_frame()
        except SandyardError as error:
            # The link often breaks a moment before the death is known; `abort` then ends this task.
            await asyncio.sleep(LINK_GRACE_SECONDS)
            log.warning("lost the output of a process", pid=self.pid, error=str(error))
            sessions.forget(self)  # the process may well live: whoever asks next attaches to it anew
            end = end_frame(RpcError("unavailable", str(error)))
        self.ended = end
        self._process, self.config = None, {}
        if self._timer is not None:
            self._timer.cancel()
        for subscriber in self._subscribers:
            subscriber.finish(end)
        self._subscribers.clear()
        sessions.retire(self)

    async def _publish(self, data: bytes) -> None:
        for subscriber in self._subscribers:
            subscriber.push(data)
        for subscriber in tuple(self._subscribers):
            while subscriber.full:
                if not await subscriber.room(STALL_SECONDS) and len(self._subscribers) > 1:
                    subscriber.finish(end_frame(RpcError("resource_exhausted", "output was not read for too long")))
                    self._subscribers.remove(subscriber)
                    break


class Sessions:
    """The processes of one sandbox."""

    def __init__(self, memory: MemoryWatch | None = None) -> None:
        self._sessions: dict[int, Session] = {}
        self._ended: deque[Session] = deque()
        self._memory = memory

    async def oom(self, status: ExitStatus) -> str | None:
        """What to tell of an exit that the kernel's want of memory may have caused."""
        return await self._memory.why(status) if self._memory is not None else None

    def add(self, process: Process, config: Mapping[str, Any], tag: str | None) -> Session:
        session = self._sessions[process.pid] = Session(process, config, tag)
        return session

    def running(self) -> list[Session]:
        return [session for session in self._sessions.values() if session.ended is None]

    def retire(self, session: Session) -> None:
        self._ended.append(session)
        if len(self._ended) > KEPT_ENDED:
            self.forget(self._ended.popleft())
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._let_go, session)

    def _let_go(self, session: Session) -> None:
        with contextlib.suppress(ValueError):  # it gave its place to a later one
            self._ended.remove(session)
        self.forget(session)

    def abort(self) -> None:
        for session in self._sessions.values():
            session.abort()

    async def find(self, agent: Agent, pid: int, tag: str) -> Session:
        """By pid, else by tag; a process of an earlier server is taken over. Raises `RpcError(not_found)`."""
        if tag and not pid:
            tagged = [session for session in self._sessions.values() if session.tag == tag]
            if not tagged:
                raise RpcError("not_found", f"process with tag {tag} not found")
            return tagged[-1]
        session = self._sessions.get(pid)
        if session is None:
            if pid not in await agent.processes():
                raise RpcError("not_found", f"process with pid {pid} not found")
            session = self.add(await agent.attach(pid), {"cmd": ""}, None)
            session.start(self)
        return session

    async def find_running(self, agent: Agent, pid: int, tag: str) -> Session:
        """Like `find`, but an ended process is not found."""
        session = await self.find(agent, pid, tag)
        _ = session.process
        return session

    def forget(self, session: Session) -> None:
        if self._sessions.get(session.pid) is session:
            del self._sessions[session.pid]
