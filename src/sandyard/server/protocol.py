"""HTTP/1.1 connections from whoever can reach the socket, before any of them has shown a key."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_LIMIT = 64 * 1024
HEAD_SECONDS = 30.0
_RESET = "sandyard.reset"
_LINGER_NOT = struct.pack("ii", 1, 0)

log = structlog.get_logger("sandyard.server")


def reset(scope: Scope) -> None:
    """Break the connection of an HTTP request off, so that no client takes what it got for all of it.

    By a TCP reset: an end of the stream within a response is, to some clients, a fault of the protocol
    and not one of the connection."""
    if (abort := scope.get("extensions", {}).get(_RESET)) is not None:
        abort()


class Stoppable:
    """An application whose requests may be cancelled by the end of the server: they are reset, quietly."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            log.info("request cut short", path=scope.get("path"))
            reset(scope)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol, with limits it lacks.

    A request's head must be complete in `HEAD_SECONDS`, and `HEAD_LIMIT` bytes at a time must bring
    the request on (a head, some body, an end): else a client holds memory or a connection for
    nothing. Trailers are not taken for headers, and refusals are JSON as everywhere else.
    """

    _fruitless = 0
    _in_head = True
    _slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._fruitless += len(data)
        super().data_received(data)
        if self._fruitless > HEAD_LIMIT and not self.transport.is_closing():
            self._refuse(431, f"the head of a request passes {HEAD_LIMIT} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_RESET: self._reset}  # type: ignore[dict-item] # as ASGI allows
        self._in_head = True
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._fruitless = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fruitless = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _expect_head(self) -> None:
        if self._slow is None:
            self._slow = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _head_came(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        self._slow = None
        if not self.transport.is_closing():
            self.transport.close()

    def _reset(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None and not self.transport.is_closing():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        reason = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}[status]
        body = json.dumps({"code": status, "message": message}).encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, reason, len(body)) + body)
        self.transport.close()
