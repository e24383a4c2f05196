"""Processes, port streams and watches over the link."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import (
    Channel,
    ExitStatus,
    PortStream,
    Process,
    ProcessSpec,
    PtySize,
    Watch,
    WatchEvent,
    WatchEventType,
)
from sandyard.guest.link import Link
from sandyard.guest.stream import Stream
from sandyard.guest.wire import STDERR, STDIN, STDOUT, Op, Reader, text, texts, u8, u16, u32

_SIGKILL = 9
_EVENTS = dict(enumerate(WatchEventType, start=1))


def encode_spec(spec: ProcessSpec) -> bytes:
    """The SPAWN request for `spec`."""
    if not spec.argv:
        raise GuestError(GuestErrorCode.INVALID, "spawn: argv is empty")
    for name in spec.env:
        if not name or "=" in name:
            raise GuestError(GuestErrorCode.INVALID, f"spawn: {name!r} is no name of an environment variable")
    size = spec.pty or PtySize(0, 0)
    return b"".join(
        (
            u8(spec.stdin | (spec.pty is not None) << 1),
            encode_size(size),
            text(spec.user or ""),
            text(spec.cwd or ""),
            texts(spec.argv),
            texts(f"{name}={value}" for name, value in spec.env.items()),
        )
    )


def decode_spec(reader: Reader) -> ProcessSpec:
    """What the agent kept of a SPAWN request; argv is `?` if that was too long to keep."""
    if not reader:
        return ProcessSpec(argv=("?",), stdin=True)
    flags, rows, cols = reader.u8(), reader.u16(), reader.u16()
    user, cwd, argv = reader.sent_text(), reader.sent_text(), reader.sent_texts()
    env = dict(pair.partition("=")[::2] for pair in reader.sent_texts())
    pty = PtySize(rows, cols) if flags & 2 else None
    return ProcessSpec(argv=argv, env=env, cwd=cwd or None, user=user or None, stdin=bool(flags & 1), pty=pty)


def encode_size(size: PtySize) -> bytes:
    if not (0 <= size.rows < 65536 and 0 <= size.cols < 65536):
        raise GuestError(GuestErrorCode.INVALID, f"a terminal of {size.rows} rows and {size.cols} columns")
    return u16(size.rows) + u16(size.cols)


class LinkProcess(Process):
    """A process over a link. `output` given up early drops what comes; `wait` goes on working."""

    def __init__(self, stream: Stream, pid: int, spec: ProcessSpec, timeout: float) -> None:
        self.pid = pid
        self.spec = spec
        self._stream = stream
        self._timeout = timeout
        self._stdin = spec.stdin or spec.pty is not None
        self._names = (Channel.PTY if spec.pty else Channel.STDOUT, Channel.STDERR)

    async def output(self) -> AsyncIterator[tuple[Channel, bytes]]:
        stream = self._stream
        try:
            while True:
                chunk = stream.take()
                if chunk:
                    yield self._names[chunk[0] - 1], chunk[1]
                elif self._at_eof():
                    return
                elif stream.ended:
                    raise stream.failure()
                else:
                    await stream.until(lambda: stream.queue or self._at_eof())
        finally:
            self._mute()

    def _at_eof(self) -> bool:
        return STDOUT in self._stream.eofs and STDERR in self._stream.eofs

    def _mute(self) -> None:
        stream = self._stream
        for channel in (STDOUT, STDERR):
            if channel not in stream.eofs:
                stream.write_eof(channel)

    async def wait(self) -> ExitStatus:
        await self._stream.until(lambda: self._stream.exit)
        if self._stream.exit is None:
            raise self._stream.failure()
        return self._stream.exit

    async def write_stdin(self, data: bytes) -> None:
        if not self._stdin or self._stream.exit:
            raise GuestError(GuestErrorCode.INVALID, f"stdin of process {self.pid} is closed")
        await self._stream.write(data)

    async def close_stdin(self) -> None:
        if self._stdin:
            # On a terminal this is only the end-of-file character; more may be typed after it.
            self._stdin = self.spec.pty is not None
            self._stream.write_eof(STDIN)

    async def resize(self, size: PtySize) -> None:
        await self._call(Op.RESIZE, encode_size(size), "resize")

    async def signal(self, number: int, *, group: bool = True) -> None:
        if not 0 <= number <= 64:
            raise GuestError(GuestErrorCode.INVALID, f"there is no signal {number}")
        await self._call(Op.SIGNAL, u32(number) + u8(group), f"signal {number}")

    async def _call(self, op: Op, rest: bytes, what: str) -> None:
        await self._stream.link.call(op, u32(self.pid) + rest, f"{what} to process {self.pid}", self._timeout)


class LinkPort(PortStream):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = b""

    async def read(self, limit: int = 65536) -> bytes:
        stream = self._stream
        if not self._rest:
            await stream.until(lambda: stream.queue or STDOUT in stream.eofs)
            chunk = stream.take()
            if chunk:
                self._rest = chunk[1]
            elif STDOUT not in stream.eofs:
                raise stream.failure()
        data, self._rest = self._rest[:limit], self._rest[limit:]
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def write_eof(self) -> None:
        self._stream.write_eof()

    async def close(self) -> None:
        self._stream.reset()


class LinkWatch(Watch):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = b""
        self._events: list[WatchEvent] = []

    def _read(self) -> None:
        while chunk := self._stream.take():
            self._rest += chunk[1]
        at = 0
        while len(self._rest) - at >= 5:
            size = int.from_bytes(self._rest[at + 1 : at + 5], "little")
            if size > 4096:
                self._lied(f"a name of {size} bytes")
            if len(self._rest) - at - 5 < size:
                break
            self._events.append(self._event(Reader(self._rest[at : at + 5 + size])))
            at += 5 + size
        self._rest = self._rest[at:]

    def _event(self, reader: Reader) -> WatchEvent:
        kind = reader.u8()
        if kind not in _EVENTS:
            self._lied(f"event type {kind}")
        return WatchEvent(_EVENTS[kind], reader.text())

    def _lied(self, what: str) -> None:
        reason = f"the agent sent {what} on {self._stream.what}"
        self._stream.link.fail(reason)
        raise AgentLinkError(reason)

    async def __anext__(self) -> WatchEvent:
        stream = self._stream
        while True:
            self._read()
            if self._events:
                return self._events.pop(0)
            if stream.ended:
                if stream.error:
                    raise stream.error
                raise StopAsyncIteration
            await stream.until(lambda: stream.queue)

    def pending(self) -> Sequence[WatchEvent]:
        self._read()
        if not self._events and self._stream.error:
            raise self._stream.error  # else a lost watch would look like one of a quiet directory
        events, self._events = self._events, []
        return events

    async def close(self) -> None:
        self._stream.reset()


async def open_process(link: Link, stream: Stream, op: Op, request: bytes, timeout: float) -> tuple[int, Reader]:
    """Start or attach; returns the pid and what follows it in the answer."""
    reader = await stream.start(op, request, timeout)
    try:
        pid = reader.u32()
        stream.take_credit(reader.u32())
    except AgentLinkError:
        stream.reset()
        raise
    return pid, reader
