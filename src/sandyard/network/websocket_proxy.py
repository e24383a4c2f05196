"""A WebSocket on this side, a WebSocket inside the sandbox, and messages passed between them."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import Event
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from sandyard.errors import AgentLinkError, GuestError
from sandyard.guest.base import PortStream
from sandyard.network.http_proxy import passed_headers

MESSAGE_LIMIT = 16 << 20
BAD_GATEWAY = 1014
_OWN = {b"host", b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}


class NotAccepted(Exception):
    """What listens on the port did not open a WebSocket. Nothing was sent to the client yet."""


async def relay(scope: Scope, receive: Receive, send: Send, stream: PortStream, mask: bytes | None = None) -> None:
    """Open the WebSocket inside, accept the one outside, pass messages until one of them closes.

    Raises `NotAccepted`, and `GuestError` or `AgentLinkError` before the one outside is accepted."""
    inside = _Inside(_protocol(scope, mask), stream)
    response = await inside.open(scope)
    if response is None:
        raise NotAccepted
    await send({"type": "websocket.accept", "subprotocol": response.headers.get("sec-websocket-protocol")})
    tasks = [asyncio.create_task(_outward(inside, send)), asyncio.create_task(_inward(inside, receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        broken = any(task.done() and task.exception() is not None for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, AgentLinkError | GuestError):
            raise result
    if broken:
        await send({"type": "websocket.close", "code": BAD_GATEWAY, "reason": "the connection inside is gone"})


def _protocol(scope: Scope, mask: bytes | None) -> ClientProtocol:
    sent = next((value for name, value in scope["headers"] if name == b"host"), b"localhost")
    host = (mask or sent).decode("latin-1")
    name, _, port = host.partition(":")
    query = scope["query_string"].decode("latin-1")
    # As it came: decoded, a path could hold line breaks, and with them headers.
    path = scope["raw_path"].decode("latin-1")
    uri = WebSocketURI(False, name, int(port) if len(port) <= 5 and port.isdecimal() else 80, path, query)
    wanted = [Subprotocol(value) for value in scope.get("subprotocols", ())]
    return ClientProtocol(uri, subprotocols=wanted or None, max_size=MESSAGE_LIMIT)


class _Inside:
    """The client end of the WebSocket inside the sandbox."""

    def __init__(self, protocol: ClientProtocol, stream: PortStream) -> None:
        self.protocol = protocol
        self._stream = stream
        self._pending: deque[Event] = deque()

    async def open(self, scope: Scope) -> Response | None:
        request: Request = self.protocol.connect()
        for name, value in passed_headers(scope):
            if name not in _OWN:
                request.headers[name.title().decode("latin-1")] = value.decode("latin-1")
        self.protocol.send_request(request)
        await self.flush()
        event = await self._event()
        return event if isinstance(event, Response) and self.protocol.handshake_exc is None else None

    async def message(self) -> str | bytes | None:
        """The next message; None when it is closed."""
        parts: list[bytes] = []
        text = False
        while isinstance(event := await self._event(), Frame) and event.opcode is not Opcode.CLOSE:
            if event.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                continue
            text = text or event.opcode is Opcode.TEXT
            parts.append(bytes(event.data))
            if event.fin:
                data = b"".join(parts)
                return data.decode("utf-8", "replace") if text else data
        return None

    async def flush(self) -> None:
        for data in self.protocol.data_to_send():
            await (self._stream.write(data) if data else self._stream.write_eof())

    async def _event(self) -> Event | None:
        while not self._pending:
            data = await self._stream.read()
            if data:
                self.protocol.receive_data(data)
            else:
                self.protocol.receive_eof()
            await self.flush()
            self._pending.extend(self.protocol.events_received())
            if not data and not self._pending:
                return None
        return self._pending.popleft()


async def _outward(inside: _Inside, send: Send) -> None:
    while (message := await inside.message()) is not None:
        await send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})
    await send({"type": "websocket.close", "code": inside.protocol.close_code or 1000})


async def _inward(inside: _Inside, receive: Receive) -> None:
    while (event := await receive())["type"] == "websocket.receive":
        if event.get("text") is not None:
            inside.protocol.send_text(event["text"].encode())
        else:
            inside.protocol.send_binary(event.get("bytes") or b"")
        await inside.flush()
    inside.protocol.send_close(1000)
    await inside.flush()
