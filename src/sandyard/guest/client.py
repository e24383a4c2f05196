"""`LinkAgent`: the agent contract over a link."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import (
    Agent,
    FileInfo,
    PortStream,
    Process,
    ProcessSpec,
    UserInfo,
    Watch,
)
from sandyard.guest.info import read_info, read_listing
from sandyard.guest.link import Link
from sandyard.guest.process import LinkPort, LinkProcess, LinkWatch, decode_spec, encode_spec, open_process
from sandyard.guest.stream import Stream
from sandyard.guest.wire import (
    PAYLOAD_MAX,
    WINDOW_FILE,
    WINDOW_OTHER,
    WINDOW_PROCESS,
    Op,
    Reader,
    blob,
    text,
    texts,
    u8,
    u16,
    u32,
    u64,
)

_TO_END = 2**64 - 1


@dataclass(frozen=True, slots=True)
class GuestUse:
    """Bytes, but for `pids` and `oom_kills`."""

    disk: int
    memory: int
    cache: int
    pids: int
    oom_kills: int


class LinkAgent(Agent):
    """`timeout` seconds bound every answer, and every pause within a file transfer."""

    def __init__(self, link: Link, *, timeout: float = 30.0) -> None:
        self._link = link
        self._timeout = timeout
        self.identify_errors: Mapping[str, str] = {}

    @property
    def closed(self) -> bool:
        """Whether the link is gone; `spawn` and all else then raise `AgentLinkError`."""
        return self._link.error is not None

    async def _call(self, op: Op, request: bytes, what: str) -> Reader:
        return await self._link.call(op, request, what, self._timeout)

    async def hello(self) -> Mapping[str, str]:
        reader = await self._call(Op.PING, b"", "hello")
        answer = {"version": reader.text(), "boot_id": reader.text(), "pid": str(reader.u32())}
        return answer | {
            "streams": str(reader.u32()),
            "processes": str(reader.u32()),
            "dropped_bytes": str(reader.u64()),
        }

    async def spawn(self, spec: ProcessSpec) -> Process:
        request = encode_spec(spec)
        stream = Stream(self._link, f"spawn of {spec.argv[0][:200]!r}", WINDOW_PROCESS)
        pid, _ = await open_process(self._link, stream, Op.SPAWN, request, self._timeout)
        return LinkProcess(stream, pid, spec, self._timeout)

    async def processes(self) -> Sequence[int]:
        reader = await self._call(Op.PROCESSES, b"", "processes")
        pids = []
        while reader:
            pids.append(reader.u32())
        return sorted(pids)

    async def attach(self, pid: int) -> Process:
        stream = Stream(self._link, f"attach to process {pid}", WINDOW_PROCESS)
        if not 0 < pid < 2**32:
            raise GuestError(GuestErrorCode.NOT_FOUND, f"{stream.what}: no such process")
        _, reader = await open_process(self._link, stream, Op.ATTACH, u32(pid), self._timeout)
        return LinkProcess(stream, pid, decode_spec(reader), self._timeout)

    async def user(self, name: str) -> UserInfo:
        reader = await self._call(Op.USER, text(name), f"user {name!r}")
        return UserInfo(reader.text(), reader.u32(), reader.u32(), reader.text(), reader.text())

    async def stat(self, path: str) -> FileInfo:
        return read_info(await self._call(Op.STAT, text(path), f"stat of {path!r}"))

    async def list_dir(self, path: str, depth: int = 1) -> Sequence[FileInfo]:
        if depth < 1:
            raise GuestError(GuestErrorCode.INVALID, f"list of {path!r}: a depth of {depth}")
        stream = Stream(self._link, f"list of {path!r}", WINDOW_OTHER)
        chunks = self._download(stream, Op.LIST, text(path) + u32(min(depth, 2**32 - 1)))
        async with contextlib.aclosing(chunks):
            return await read_listing(chunks, stream.what)

    async def make_dir(self, path: str, user: str | None = None, mode: int = 0o755) -> None:
        await self._call(Op.MKDIR, text(path) + text(user or "") + u32(mode & 0o7777), f"mkdir of {path!r}")

    async def move(self, source: str, destination: str, user: str | None = None) -> None:
        request = text(source) + text(destination) + text(user or "")
        await self._call(Op.MOVE, request, f"move of {source!r} to {destination!r}")

    async def remove(self, path: str) -> None:
        await self._call(Op.REMOVE, text(path), f"remove of {path!r}")

    def read_file(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if offset < 0 or (length is not None and length < 0):
            raise GuestError(GuestErrorCode.INVALID, f"read of {path!r}: offset {offset}, length {length}")
        request = text(path) + u64(offset) + u64(_TO_END if length is None else length)
        return self._download(Stream(self._link, f"read of {path!r}", WINDOW_FILE), Op.READ, request)

    async def _download(self, stream: Stream, op: Op, request: bytes) -> AsyncGenerator[bytes, None]:
        try:
            await stream.start(op, request, self._timeout)
            while True:
                chunk = stream.take()
                if chunk:
                    yield chunk[1]
                elif stream.error:
                    raise stream.error
                elif stream.final is not None:
                    return
                elif stream.ended:
                    raise stream.failure()
                else:
                    await stream.until(lambda: stream.queue, self._timeout)
        finally:
            stream.reset()

    async def write_file(
        self,
        path: str,
        data: AsyncIterator[bytes] | bytes,
        user: str | None = None,
        mode: int = 0o644,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        stream = Stream(self._link, f"write of {path!r}", 0, upload=WINDOW_FILE)
        request = text(path) + text(user or "") + u32(mode & 0o7777)
        if metadata:
            pairs = [part for pair in metadata.items() for part in pair]
            self._link.open(Op.STORE, request + texts(pairs), stream)
        else:
            self._link.open(Op.WRITE, request, stream)
        try:
            if isinstance(data, bytes | bytearray | memoryview):
                await self._send(stream, memoryview(data if isinstance(data, bytes) else bytes(data)))
            else:
                await self._send_all(stream, data)
            stream.write_eof()
            await stream.until(lambda: stream.final, self._timeout)
            if stream.final is None:
                raise stream.failure()
            return stream.final.u64()
        finally:
            stream.reset()

    async def _send_all(self, stream: Stream, chunks: AsyncIterator[bytes]) -> None:
        """Cut the chunks into whole parts; only what is left of one is copied, to wait for the next."""
        rest = b""
        async for chunk in chunks:
            view = memoryview(chunk)
            if rest:
                missing = PAYLOAD_MAX - len(rest)
                rest, view = rest + view[:missing], view[missing:]
                if len(rest) < PAYLOAD_MAX:
                    continue
                await self._send(stream, memoryview(rest))
            whole = len(view) - len(view) % PAYLOAD_MAX
            await self._send(stream, view[:whole])
            rest = bytes(view[whole:])
        await self._send(stream, memoryview(rest))

    async def _send(self, stream: Stream, data: memoryview) -> None:
        for at in range(0, len(data), PAYLOAD_MAX):
            part = data[at : at + PAYLOAD_MAX]
            # Whole parts only: each is one write(2) on the other side.
            if stream.credit < len(part):
                await stream.until(partial(_has_credit, stream, len(part)), self._timeout)
            if stream.ended:
                raise stream.failure()
            await stream.write(part)

    async def connect_port(self, port: int) -> PortStream:
        if not 0 < port < 65536:
            raise GuestError(GuestErrorCode.INVALID, f"there is no port {port}")
        stream = Stream(self._link, f"connection to port {port}", WINDOW_OTHER, upload=WINDOW_OTHER)
        await stream.start(Op.CONNECT, u16(port), self._timeout)
        return LinkPort(stream)

    async def watch(self, path: str, *, recursive: bool = False) -> Watch:
        stream = Stream(self._link, f"watch of {path!r}", WINDOW_OTHER)
        await stream.start(Op.WATCH, text(path) + u8(recursive), self._timeout)
        return LinkWatch(stream)

    async def identify(self, *, hostname: str | None = None, time_ns: int | None = None, seed: bytes = b"") -> None:
        """Each part is best effort; what a part failed with is in `identify_errors` afterwards."""
        request = text(hostname or "") + u64(time_ns or 0) + blob(seed[:512])
        reader = await self._call(Op.IDENTIFY, request, "identify")
        codes = {"hostname": reader.u32(), "time": reader.u32(), "seed": reader.u32()}
        self.identify_errors = {part: errno.errorcode.get(code, str(code)) for part, code in codes.items() if code}

    async def freeze(self, disk: bool, *, processes: bool = False) -> None:
        """What of a guest kernel stands still from here on, and what goes on: its `disk`, all written to it, which
        goes on by itself after 5 seconds, and the `processes` that were started, which do not. Only an agent that
        is PID 1 of a guest kernel can; another answers `GuestError`."""
        await self._call(Op.FREEZE, bytes((disk + 2 * processes,)), "freeze" if disk or processes else "thaw")

    async def stand_still(self) -> None:
        """`freeze` of the disk and the processes, and the link stands still with them: until `go_on` nothing is sent,
        but waits, and nothing is read. So a machine that is stopped after this has its memory to itself: what comes
        for a guest is put into its memory even while it is stopped. Where it fails the link has gone on."""
        await self._link.last_call(Op.FREEZE, bytes((3,)), "freeze", self._timeout)

    def go_on(self) -> None:
        """Let the link go on; idempotent. The disk and the processes do with `freeze(False)`."""
        self._link.go_on()

    async def use(self) -> GuestUse:
        """What a guest kernel counts; zeros for an agent that has none of its own."""
        reader = await self._call(Op.USE, b"", "use")
        return GuestUse(*(reader.u64() for _ in range(5)))

    async def configure(self, records: bytes) -> None:
        """Set limits, environment, names, files and network of a guest kernel anew; `records` is as in
        `guest/PROTOCOL.md`, the last one empty. Only an agent that is PID 1 of a guest kernel can."""
        await self._call(Op.CONFIGURE, blob(records), "configure")

    async def close(self) -> None:
        await self._link.close()


def _has_credit(stream: Stream, size: int) -> bool:
    return stream.credit >= size


def _connect(path: Path) -> socket.socket:
    # By hand: a Unix socket connects at once or, with its queue full, not at all, which asyncio takes for "soon".
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        with contextlib.ExitStack() as stack:
            target = str(path)
            if len(os.fsencode(target)) > 100:  # longer than a socket address can be
                parent = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
                stack.callback(os.close, parent)
                target = f"/proc/self/fd/{parent}/{path.name}"
            connection.connect(target)
    except BaseException:
        connection.close()
        raise
    return connection


async def connect_agent(path: Path, *, timeout: float, call_timeout: float = 30.0) -> LinkAgent:
    """One attempt at the socket at `path`; waits up to `timeout` seconds for the agent's greeting."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: Link(loop), sock=_connect(path))
    try:
        await asyncio.wait_for(asyncio.shield(link.greeting), timeout)
    except BaseException as error:
        await link.close()
        if isinstance(error, TimeoutError):
            raise AgentLinkError(f"the agent at {path} did not greet within {timeout:g} s") from None
        raise
    return LinkAgent(link, timeout=call_timeout)


async def open_agent(path: Path, timeout: float, *, call_timeout: float = 30.0) -> LinkAgent:
    """Connect to the agent behind the Unix socket at `path`, retrying for `timeout` seconds.

    `AgentLinkError` names the last obstacle; a peer that speaks another protocol is not retried.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    pause = 0.002
    while True:
        try:
            return await connect_agent(path, timeout=max(deadline - loop.time(), 0.01), call_timeout=call_timeout)
        except AgentLinkError:
            raise
        except OSError as error:
            if loop.time() + pause > deadline:
                raise AgentLinkError(f"no agent answers at {path} within {timeout:g} s: {error}") from error
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.1)
