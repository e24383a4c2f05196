"""A stream that goes on after its first answer: a process, a file, a port, a watch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import ExitStatus
from sandyard.guest.link import Link, Receiver
from sandyard.guest.wire import CREDIT_MAX, FIN, PAYLOAD_MAX, STDIN, Frame, Op, Reader, u32

_SMALL = 4096
_SIGNAL_MAX, _CODE_MAX = 64, 255


class Stream(Receiver):
    """State a stream has reached, and one way to wait for more: `until(condition)`.

    Holds at most the window of each channel. Nothing here is an asyncio task.
    """

    __slots__ = ("_returned", "_room", "_waiters", "answer", "credit", "ended", "eofs", "error", "exit",
                 "final", "link", "queue", "window")  # fmt: skip

    def __init__(self, link: Link, what: str, window: int, *, upload: int = 0) -> None:
        super().__init__(what)
        self.link = link
        self.window = window
        self.credit = upload  # what may be sent on channel 0
        self.answer: Reader | None = None
        self.final: Reader | None = None
        self.error: AgentLinkError | GuestError | None = None
        self.ended = False
        self.eofs: set[int] = set()
        self.exit: ExitStatus | None = None
        self.queue: deque[tuple[int, bytes | bytearray]] = deque()
        self._room = [0, window, window]
        self._returned = [0, 0, 0]
        self._waiters: list[asyncio.Future[None]] = []

    # --- from the link ---

    def on_lost(self, error: AgentLinkError) -> None:
        self.error = self.error or error
        self.ended = True
        self._wake()

    def on_frame(self, frame: int, channel: int, flags: int, payload: bytes) -> None:
        if flags & FIN:
            self.ended = True
        if frame == Frame.DATA:
            self._on_data(channel, payload)
        elif frame == Frame.RESULT:
            self._on_result(flags, payload)
        elif frame == Frame.CREDIT and channel == STDIN:
            self.take_credit(Reader(payload).u32())
        elif frame == Frame.EOF and channel not in self.eofs:
            self.eofs.add(channel)
        elif frame == Frame.EXIT and self.exit is None:
            reader = Reader(payload)
            killed, number = reader.u8(), reader.u32()
            if number > (_SIGNAL_MAX if killed else _CODE_MAX):
                raise AgentLinkError(f"the agent sent an end by number {number} on {self.what}")
            self.exit = ExitStatus(signal=number) if killed else ExitStatus(code=number)
        elif frame == Frame.RESET and flags & FIN:
            self.error = self.error or AgentLinkError(f"{self.what} was taken over by another attach")
        else:
            raise AgentLinkError(f"the agent sent frame type {frame}, channel {channel} out of place on {self.what}")
        self._wake()

    def take_credit(self, size: int) -> None:
        """Raises `AgentLinkError` for more than any agent gives."""
        self.credit += size
        if self.credit > CREDIT_MAX:
            raise AgentLinkError(f"the agent gave {self.credit} bytes of credit on {self.what}")

    def _on_data(self, channel: int, payload: bytes) -> None:
        self._room[channel] -= len(payload)
        if self._room[channel] < 0 or not payload or channel in self.eofs or self.answer is None:
            raise AgentLinkError(f"the agent sent {len(payload)} bytes on {self.what} that nobody asked for")
        # A flood of tiny frames must not cost an object each.
        if len(payload) < _SMALL and self.queue and self.queue[-1][0] == channel:
            last = self.queue[-1][1]
            if len(last) + len(payload) <= PAYLOAD_MAX:
                if isinstance(last, bytes):
                    self.queue[-1] = (channel, bytearray(last))
                self.queue[-1][1].__iadd__(payload)  # type: ignore[union-attr]
                return
        self.queue.append((channel, payload))

    def _on_result(self, flags: int, payload: bytes) -> None:
        if self.answer is not None and not flags & FIN:
            raise AgentLinkError(f"the agent answered {self.what} twice")
        try:
            reader = self.result(payload)
        except GuestError as error:
            if not flags & FIN:
                raise AgentLinkError(f"the agent failed {self.what} without ending it") from error
            self.error = error
            return
        if self.answer is None:
            self.answer = reader
        else:
            self.final = reader

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- for the consumer ---

    async def until(self, condition: Callable[[], object], timeout: float | None = None) -> None:
        """Wait until `condition()` holds or the stream has ended. `AgentLinkError` after `timeout` seconds."""
        if condition() or self.ended:
            return
        loop = self.link.loop
        timer = loop.call_later(timeout, self._expire, timeout) if timeout is not None else None
        try:
            while not condition() and not self.ended:
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters.append(waiter)
                try:
                    await waiter
                finally:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
        finally:
            if timer:
                timer.cancel()

    def _expire(self, timeout: float) -> None:
        self.reset()
        self.on_lost(AgentLinkError(f"the agent did not go on with {self.what} within {timeout:g} s"))

    async def start(self, op: Op, request: bytes, timeout: float) -> Reader:
        """Open the stream and return the fields of its first answer."""
        self.link.open(op, request, self)
        try:
            await self.until(lambda: self.answer is not None, timeout)
        except BaseException:
            self.reset()
            raise
        if self.answer is not None:
            return self.answer
        raise self.failure()

    def failure(self) -> AgentLinkError | GuestError:
        return self.error or AgentLinkError(f"the agent ended {self.what} too early")

    def take(self) -> tuple[int, bytes] | None:
        """The next chunk that has arrived, if any; gives its credit back."""
        if not self.queue:
            return None
        channel, data = self.queue.popleft()
        self._returned[channel] += len(data)
        if self._returned[channel] >= self.window // 4 and not self.ended and channel not in self.eofs:
            self._room[channel] += self._returned[channel]
            self.link.send(Frame.CREDIT, channel, self.id, u32(self._returned[channel]))
            self._returned[channel] = 0
        return channel, bytes(data)

    async def write(self, data: bytes | memoryview, timeout: float | None = None) -> None:
        """Send on channel 0, waiting for credit. `GuestError(INVALID)` if the other side reads no more."""
        at = 0
        while at < len(data):
            if self.credit <= 0:
                await self.until(lambda: self.credit > 0 or STDIN in self.eofs, timeout)
            if self.ended and self.error:
                raise self.error
            if self.ended or STDIN in self.eofs:
                raise GuestError(GuestErrorCode.INVALID, f"{self.what}: the other side reads no more")
            part = data[at : at + min(PAYLOAD_MAX, self.credit)]
            self.credit -= len(part)
            at += len(part)
            self.link.send(Frame.DATA, STDIN, self.id, part)
            await self.link.drain()

    def write_eof(self, channel: int = STDIN) -> None:
        if not self.ended:
            self.link.send(Frame.EOF, channel, self.id)

    def reset(self) -> None:
        """Give the stream up; a process goes on, detached."""
        if not self.ended:
            self.link.reset(self)
            self.ended = True
            self.queue.clear()
            self._wake()
