"""One HTTP request over one stream to a port inside a sandbox.

Bodies stream both ways; what the program inside sends is parsed, so that it can say nothing but one
response.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import httptools
from starlette.types import Receive, Scope, Send

from sandyard.errors import AgentLinkError, GuestError
from sandyard.guest.base import PortStream

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_HEAD_LIMIT = 64 * 1024
# Meant for this server: untrusted code must not learn them.
_OURS = {b"x-api-key", b"x-access-token", b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token"}


class BadResponse(Exception):
    """What listens on the port did not answer with HTTP. Nothing was sent to the client yet."""


class BrokenResponse(Exception):
    """The response broke off after its head was sent to the client."""


class ClientLeft(Exception):
    """The client went away before it had all of the response."""


def passed_headers(scope: Scope, mask: bytes | None = None) -> list[tuple[bytes, bytes]]:
    """The request headers that may be passed on, with where the request came from; `mask` instead of its Host."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    passed = [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP and name not in _OURS and not (name == b"authorization" and _is_key(value))
    ]
    host = next((value for name, value in passed if name == b"host"), b"")
    if mask is not None:
        passed = [(name, mask if name == b"host" else value) for name, value in passed]
    return [*passed, (b"x-forwarded-host", host), (b"x-forwarded-proto", scope["scheme"].encode())]


def _is_key(value: bytes) -> bool:
    # Any other Authorization is between the client and the program inside.
    kind, _, credential = value.strip().partition(b" ")
    return kind.lower() == b"bearer" and credential.strip().startswith(b"e2b_")


async def exchange(scope: Scope, receive: Receive, send: Send, stream: PortStream, mask: bytes | None = None) -> None:
    """Pass the request in and the response out; programs see `mask` as the Host, if it is given.

    Raises `BadResponse`, `BrokenResponse`, `ClientLeft`, `AgentLinkError`."""
    upload = asyncio.create_task(_upload(scope, receive, stream, mask))
    answer = asyncio.create_task(_send_response(scope, send, stream))
    try:
        await asyncio.wait((upload, answer), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() and isinstance(upload.exception(), ClientLeft):
            raise ClientLeft
        await answer
    finally:
        upload.cancel()
        answer.cancel()
        await asyncio.gather(upload, answer, return_exceptions=True)


async def _upload(scope: Scope, receive: Receive, stream: PortStream, mask: bytes | None) -> None:
    """Does not return: after the request it waits for the client to leave, for the response may have no end."""
    # A program may well answer, and close, without reading all of the request.
    with contextlib.suppress(GuestError, AgentLinkError):
        await _send_request(scope, receive, stream, mask)
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft


async def _send_request(scope: Scope, receive: Receive, stream: PortStream, mask: bytes | None) -> None:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    head = [scope["method"].encode() + b" " + target + b" HTTP/1.1"]
    # In the spelling that people use: there are programs that look for just that.
    head += [name.title() + b": " + value for name, value in passed_headers(scope, mask)]
    head.append(b"Connection: close")
    if chunked:
        head.append(b"Transfer-Encoding: chunked")
    await stream.write(b"\r\n".join(head) + b"\r\n\r\n")
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        more = message.get("more_body", False)
        if chunk := message.get("body"):
            await stream.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
    if chunked:
        await stream.write(b"0\r\n\r\n")
    # A program that computes for a client that went away can stop: it must hear of it.
    while (await receive())["type"] != "http.disconnect":
        pass
    await stream.close()  # ends the response too


class _Response:
    """Collects what the parser says."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_done = False
        self.done = False
        self.until_close = True
        self.fruitless = 0
        self.body: list[bytes] = []
        self.parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Raises `HttpParserError`, and `BadResponse` for a head or trailers without end."""
        self.fruitless += len(data)
        self.parser.feed_data(data)
        if self.body:
            self.fruitless = 0
        if self.fruitless > _HEAD_LIMIT:
            raise BadResponse(f"more than {_HEAD_LIMIT} bytes that are no body")

    def check(self, status: int) -> None:
        """Before the head is passed on. Raises `BadResponse`."""
        if not 200 <= status < 600:
            raise BadResponse(f"status {status}")
        if status in (204, 304):  # they have no body, whatever its length would be
            self.headers = [(name, value) for name, value in self.headers if name != b"content-length"]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # a trailer
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self.until_close = False
        if lower not in _HOP_BY_HOP:
            self.headers.append((lower, value))

    def on_headers_complete(self) -> None:
        self.head_done = self.parser.get_status_code() >= 200

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        if self.head_done:
            self.done = True
        else:  # an interim (1xx) response: the real one follows
            self.headers.clear()
            self.until_close = True


async def _send_response(scope: Scope, send: Send, stream: PortStream) -> None:
    response = _Response()
    started = False
    try:
        async for data in _reads(stream):
            response.feed(data)
            if not response.head_done:
                continue
            status = response.parser.get_status_code()
            if not started:
                response.check(status)
                started = True
                await send({"type": "http.response.start", "status": status, "headers": response.headers})
            bodiless = scope["method"] == "HEAD" or status in (204, 304)
            body, response.body[:] = b"" if bodiless else b"".join(response.body), []
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if response.done or bodiless:
                break
        else:
            if not started or not response.until_close:
                raise BadResponse("the connection was closed before the response was complete")
        await send({"type": "http.response.body", "body": b""})
    except (httptools.HttpParserError, httptools.HttpParserUpgrade, GuestError, BadResponse) as error:
        if started:
            raise BrokenResponse(str(error)) from error
        raise BadResponse(str(error)) from error


async def _reads(stream: PortStream) -> AsyncIterator[bytes]:
    while data := await stream.read():
        yield data
