"""The few things of HTTP that the data plane needs, straight on ASGI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

Headers = dict[bytes, bytes]
HeaderList = Sequence[tuple[bytes, bytes]]


class BodyTooLarge(Exception):
    """The request body passes the limit of its endpoint."""


class ClientGone(Exception):
    """The client closed the connection before the request was complete."""


def headers_of(scope: Scope) -> Headers:
    """Header names are lower case; of a repeated header the first counts."""
    found: Headers = {}
    for name, value in scope["headers"]:
        found.setdefault(name, value)
    return found


def decimal(value: bytes | None) -> int | None:
    """The number of a header, None for anything but one to eighteen ASCII digits."""
    return int(value) if value is not None and len(value) <= 18 and value.isdigit() else None


async def body_chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            yield chunk
        if not message.get("more_body", False):
            return


async def read_body(receive: Receive, limit: int) -> bytes:
    """Raises `BodyTooLarge` and `ClientGone`."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(body) > limit:
            raise BodyTooLarge
        return body
    parts, size = [body], len(body)
    async for chunk in body_chunks(receive):
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge
        parts.append(chunk)
    return b"".join(parts)


async def respond(
    send: Send, status: int, body: bytes = b"", content_type: bytes = b"application/json", headers: HeaderList = ()
) -> None:
    fields = [*headers]
    if body:
        fields.append((b"content-type", content_type))
    if status != 204:
        fields.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, status: int, value: Any, headers: HeaderList = ()) -> None:
    await respond(send, status, json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), headers=headers)


async def respond_error(send: Send, status: int, message: str, headers: HeaderList = (), **extra: object) -> None:
    """The error body every E2B client parses: `code` and `message`."""
    await respond_json(send, status, {"code": status, "message": message, **extra}, headers)
