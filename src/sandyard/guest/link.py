"""The link to an agent: frames, streams and credit over one byte stream.

The peer is hostile. Frames and buffers are bounded, credit is enforced, and whatever does not fit
the protocol closes the link with an `AgentLinkError` that names it; every call and stream on it
fails with that error.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.wire import (
    CODES,
    FIN,
    HEADER,
    MAGIC,
    MORE,
    PAYLOAD_MAX,
    REQUEST_MAX,
    VERSION,
    Frame,
    Op,
    Reader,
    u16,
)

_BUFFER = 4 * PAYLOAD_MAX
_CLOSING_MAX = 4096
_COPY_MAX = 8192  # below that one buffer is cheaper than two
_FROM_AGENT = frozenset({Frame.DATA, Frame.CREDIT, Frame.EOF, Frame.RESULT, Frame.EXIT, Frame.RESET})


class Receiver(ABC):
    """The host's end of a stream: gets its frames, in order, from the link."""

    __slots__ = ("id", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.id = 0

    @abstractmethod
    def on_frame(self, frame: int, channel: int, flags: int, payload: bytes) -> None:
        """Handle a frame. `AgentLinkError` if it has no place here: the link closes."""

    @abstractmethod
    def on_lost(self, error: AgentLinkError) -> None:
        """The link is gone."""

    def result(self, payload: bytes) -> Reader:
        """The fields of a RESULT, or the `GuestError` in it, raised."""
        reader = Reader(payload)
        code = reader.u16()
        if code == 0:
            return reader
        number, step = reader.u32(), reader.text()
        if code not in CODES:
            raise AgentLinkError(f"the agent answered {self.what} with unknown error code {code}")
        raise GuestError(CODES[code], f"{self.what}: {describe(CODES[code], number, step)}")


def describe(code: GuestErrorCode, number: int, step: str) -> str:
    reason = os.strerror(number) if 0 < number < 4096 else str(code).replace("_", " ")
    where = "".join(letter if letter.isprintable() else "?" for letter in step[:64])
    return f"{where}: {reason}"


class _Closing(Receiver):
    """A stream the host gave up: what is under way for it is dropped until the agent's FIN."""

    __slots__ = ()

    def on_frame(self, frame: int, channel: int, flags: int, payload: bytes) -> None:
        pass

    def on_lost(self, error: AgentLinkError) -> None:
        pass


class Call(Receiver):
    """A request with one answer."""

    __slots__ = ("future",)

    def __init__(self, what: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(what)
        self.future: asyncio.Future[Reader] = loop.create_future()

    def on_frame(self, frame: int, channel: int, flags: int, payload: bytes) -> None:
        if frame != Frame.RESULT or not flags & FIN:
            raise AgentLinkError(f"the agent answered {self.what} with frame type {frame}")
        if self.future.done():
            return
        try:
            self.future.set_result(self.result(payload))
        except GuestError as error:
            self.future.set_exception(error)

    def on_lost(self, error: AgentLinkError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Link(asyncio.BufferedProtocol):
    """One connection to an agent. `greeting` is done once the agent said hello."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.greeting: asyncio.Future[Reader] = loop.create_future()
        self.error: AgentLinkError | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._head = self._tail = 0
        self._streams: dict[int, Receiver] = {}
        self._closing = 0
        self._last_id = 0
        self._writable: asyncio.Future[None] | None = None
        self._held: list[tuple[bytes, bytes | memoryview]] | None = None
        self._closed: asyncio.Future[None] = loop.create_future()

    # --- requests ---

    def open(self, op: Op, request: bytes, receiver: Receiver) -> None:
        """Begin a stream. `GuestError(TOO_BIG)` if the request is over 3 MiB."""
        if self.error:
            raise self.error
        if len(request) > REQUEST_MAX:
            raise GuestError(GuestErrorCode.TOO_BIG, f"{receiver.what}: a request of {len(request)} bytes is too big")
        stream_id = self._next_id()
        receiver.id = stream_id
        self._streams[stream_id] = receiver
        for at in range(0, len(request) - PAYLOAD_MAX, PAYLOAD_MAX):
            self.send(Frame.OPEN, op, stream_id, request[at : at + PAYLOAD_MAX], MORE)
        rest = (len(request) - 1) // PAYLOAD_MAX * PAYLOAD_MAX if request else 0
        self.send(Frame.OPEN, op, stream_id, request[rest:])

    def _next_id(self) -> int:
        while True:
            self._last_id = self._last_id % 0xFFFFFFFF + 1
            if self._last_id not in self._streams:
                return self._last_id

    async def call(self, op: Op, request: bytes, what: str, timeout: float) -> Reader:
        """One request, one answer. `AgentLinkError` if it does not come within `timeout` seconds."""
        call = Call(what, self.loop)
        self.open(op, request, call)
        return await self._answer(call, timeout)

    async def last_call(self, op: Op, request: bytes, what: str, timeout: float) -> Reader:
        """As `call`, and until `go_on` nothing is sent after the request, but waits in order, and nothing is read after
        the answer. Where it fails the link has gone on."""
        call = Call(what, self.loop)
        self.open(op, request, call)
        self._held = self._held or []
        try:
            reader = await self._answer(call, timeout)
        except BaseException:
            self.go_on()
            raise
        if self._transport and not self.error:
            self._transport.pause_reading()
        return reader

    def go_on(self) -> None:
        """After `last_call`: send what waited, and read again. Idempotent."""
        held, self._held = self._held, None
        if held is None or self._transport is None or self.error:
            return
        for header, payload in held:
            self._write(header, payload)
        self._transport.resume_reading()

    async def _answer(self, call: Call, timeout: float) -> Reader:
        timer = self.loop.call_later(timeout, self._expire, call, timeout)
        try:
            return await call.future
        finally:
            timer.cancel()
            self.reset(call)

    def _expire(self, call: Call, timeout: float) -> None:
        call.on_lost(AgentLinkError(f"the agent did not answer {call.what} within {timeout:g} s"))

    def reset(self, receiver: Receiver) -> None:
        """Give a stream up. Nothing happens if it has ended."""
        if self.error or self._streams.get(receiver.id) is not receiver:
            return
        closing = _Closing(receiver.what)
        closing.id = receiver.id
        self._streams[receiver.id] = closing
        self._closing += 1
        if self._closing > _CLOSING_MAX:
            self.fail(f"the agent left {self._closing} streams unfinished that were given up")
            return
        self.send(Frame.RESET, 0, receiver.id)

    def send(self, frame: int, channel: int, stream_id: int, payload: bytes | memoryview = b"", flags: int = 0) -> None:
        """`payload` must not change any more: it may be sent from where it lies."""
        if self._transport is None or self.error:
            return
        header = HEADER.pack(len(payload), frame, channel, flags, stream_id)
        if self._held is None:
            self._write(header, payload)
        else:
            self._held.append((header, payload))

    def _write(self, header: bytes, payload: bytes | memoryview) -> None:
        if self._transport is None:
            return
        if len(payload) < _COPY_MAX:
            self._transport.write(header + payload)
        else:
            self._transport.writelines((header, payload))

    async def drain(self) -> None:
        """Wait while the socket is full."""
        if self._writable:
            await asyncio.shield(self._writable)
        if self.error:
            raise self.error

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Close the link because of `reason`. Only the first counts."""
        if self.error:
            return
        self.error = AgentLinkError(reason)
        self.error.__cause__ = cause
        self._held = None
        if self._transport:
            self._transport.abort()
        if not self.greeting.done():
            self.greeting.set_exception(self.error)
            self.greeting.exception()  # nobody may be waiting for it
        streams, self._streams = self._streams, {}
        for receiver in streams.values():
            receiver.on_lost(self.error)
        self._resume()

    async def close(self) -> None:
        self.fail("the link to the agent was closed")
        if self._transport:
            await asyncio.shield(self._closed)

    # --- asyncio's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * PAYLOAD_MAX)
        self.send(Frame.HELLO, 0, 0, MAGIC + u16(VERSION))

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(f"the link to the agent broke: {exc}" if exc else "the agent closed the link", exc)
        self._closed.set_result(None)

    def eof_received(self) -> None:
        self.fail("the agent closed the link")

    def pause_writing(self) -> None:
        self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        self._resume()

    def _resume(self) -> None:
        if self._writable and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._tail :]

    def buffer_updated(self, nbytes: int) -> None:
        self._tail += nbytes
        try:
            self._parse()
        except AgentLinkError as error:
            self.fail(error.message)

    def _parse(self) -> None:
        head, tail, view = self._head, self._tail, self._view
        unpack: Callable[..., tuple[Any, ...]] = HEADER.unpack_from
        while tail - head >= HEADER.size:
            length, frame, channel, flags, stream_id = unpack(view, head)
            if length > PAYLOAD_MAX:
                raise AgentLinkError(f"the agent sent a frame of {length} bytes, over {PAYLOAD_MAX}")
            start = head + HEADER.size
            if tail - start < length:
                break
            head = start + length
            self._on_frame(frame, channel, flags, stream_id, bytes(view[start:head]))
            if self.error:
                return
        if head == tail:
            head = tail = 0
        elif _BUFFER - head < HEADER.size + PAYLOAD_MAX:
            self._buffer[: tail - head] = self._buffer[head:tail]
            head, tail = 0, tail - head
        self._head, self._tail = head, tail

    def _on_frame(self, frame: int, channel: int, flags: int, stream_id: int, payload: bytes) -> None:
        receiver = self._streams.get(stream_id)
        if receiver is None:
            self._on_hello(frame, stream_id, payload)
            return
        if channel > 2 or flags & ~FIN or frame not in _FROM_AGENT:
            raise AgentLinkError(f"the agent sent a frame of type {frame}, channel {channel}, flags {flags:#x}")
        if flags & FIN:
            if frame not in (Frame.RESULT, Frame.RESET):
                raise AgentLinkError(f"the agent ended {receiver.what} with frame type {frame}")
            del self._streams[stream_id]
            self._closing -= isinstance(receiver, _Closing)
        try:
            receiver.on_frame(frame, channel, flags, payload)
        except AgentLinkError as error:
            receiver.on_lost(error)
            raise

    def _on_hello(self, frame: int, stream_id: int, payload: bytes) -> None:
        if frame != Frame.HELLO or stream_id or self.greeting.done():
            raise AgentLinkError(f"the agent sent a frame of type {frame} for unknown stream {stream_id}")
        reader = Reader(payload)
        magic, version = reader.raw(4), reader.u16()
        if magic != MAGIC or version != VERSION:
            raise AgentLinkError(f"the agent speaks {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
        self.greeting.set_result(reader)
