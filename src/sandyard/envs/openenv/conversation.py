"""A WebSocket of a worker: its messages in order to a session, its silence and its end to the env's release."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sandyard.envs.openenv.held import HeldSession
from sandyard.envs.openenv.protocol import (
    ErrorCode,
    Fault,
    Message,
    dump,
    error_message,
    parse_request,
)
from sandyard.envs.openenv.seat import Seat
from sandyard.envs.openenv.session import Session

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
# Beyond these, bytes wait in the socket. Fewer would stop pongs from being seen during a long step.
_INBOX = 64
_NORMAL, _GOING_AWAY = 1000, 1001


class Conversation:
    """Serves one accepted WebSocket. `rpc`: its messages are bare JSON-RPC, as `/mcp` has them."""

    def __init__(self, receive: Receive, send: Send, *, idle_timeout: float, rpc: bool = False) -> None:
        self._receive = receive
        self._send = send
        self._idle_timeout = idle_timeout
        self._rpc = rpc
        self._inbox: asyncio.Queue[str | None] = asyncio.Queue(_INBOX)
        self._work: asyncio.Task[None] | None = None

    async def refuse(self, message: Message) -> None:
        """Say why there is no session, and close."""
        with contextlib.suppress(OSError):  # the client is gone
            await self._say(message)
            await self._close(_NORMAL)

    async def run(self, session: Session | HeldSession, seat: Seat) -> None:
        """Until either side closes. The env is released before this returns, whatever happens."""
        seat.hold("session")
        self._work = asyncio.create_task(self._converse(session, seat))
        try:
            await self._read(self._work)
        finally:
            self._work.cancel()
            await asyncio.wait([self._work])
            await session.close()
            seat.leave("session")

    def stop(self) -> None:
        """End after what was already asked for."""
        try:
            self._inbox.put_nowait(None)
        except asyncio.QueueFull:
            if self._work is not None:
                self._work.cancel()

    async def _read(self, work: asyncio.Task[None]) -> None:
        while (event := await self._receive())["type"] != "websocket.disconnect":
            text = event.get("text")
            if text is None:
                text = (event.get("bytes") or b"").decode("utf-8", "replace")
            if not work.done():
                await self._inbox.put(text)

    async def _converse(self, session: Session | HeldSession, seat: Seat) -> None:
        try:
            while (text := await self._next(session, seat)) is not None:
                message = await self._answer(session, text)
                if message is None:
                    break
                await self._say(message)
            await self._close(_NORMAL if text is not None else _GOING_AWAY)
        except OSError:
            return  # the client is gone; the reader learns of it
        finally:
            while not self._inbox.empty():  # a reader that waits for room is let go
                self._inbox.get_nowait()

    async def _next(self, session: Session | HeldSession, seat: Seat) -> str | None:
        """The next message. After a silence too long the env is released, and the next one is refused."""
        try:
            async with asyncio.timeout(self._idle_timeout):
                return await self._inbox.get()
        except TimeoutError:
            await session.close()
            seat.leave("socket")
            seat.leave("session")
        if await self._inbox.get() is not None:
            text = f"the session ended after {self._idle_timeout:g} s without a request; connect again"
            await self._say(error_message(ErrorCode.SESSION_ERROR, text))
        return None

    async def _answer(self, session: Session | HeldSession, text: str) -> Message | None:
        try:
            if self._rpc:
                return await _answer_rpc(session, text)
            request = parse_request(text)
            return None if request.kind == "close" else await session.answer(request)
        except Fault as fault:
            return fault.to_message()

    async def _say(self, message: Message) -> None:
        try:
            text = dump(message)
        except Fault as fault:
            text = dump(fault.to_message())
        await self._send({"type": "websocket.send", "text": text})

    async def _close(self, code: int) -> None:
        await self._send({"type": "websocket.close", "code": code})


async def _answer_rpc(session: Session | HeldSession, text: str) -> Message:
    request = parse_request(f'{{"type":"mcp","data":{text}}}')
    return await session.answer_rpc(request.data)
