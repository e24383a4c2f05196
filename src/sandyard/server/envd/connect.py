"""The Connect protocol as E2B clients speak it: JSON codec, no compression, HTTP/1.1."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

from sandyard.errors import BadRequest, GuestError, GuestErrorCode, SandyardError

Message = dict[str, Any]

FRAME_LIMIT = 4 << 20
END_STREAM = 0x02

HTTP_STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}

_CODE_OF_GUEST_ERROR = {
    GuestErrorCode.NOT_FOUND: "not_found",
    GuestErrorCode.EXISTS: "already_exists",
    GuestErrorCode.PERMISSION: "permission_denied",
    GuestErrorCode.NO_SPACE: "resource_exhausted",
    GuestErrorCode.LIMIT: "resource_exhausted",
    GuestErrorCode.NO_USER: "unauthenticated",
    GuestErrorCode.REFUSED: "unavailable",
    GuestErrorCode.IO: "internal",
}


class RpcError(Exception):
    """An error of a call, with its Connect code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def body(self) -> bytes:
        return json.dumps({"code": self.code, "message": str(self)}).encode()


def rpc_error(error: SandyardError) -> RpcError:
    """The Connect error for what the agent or the server says."""
    if isinstance(error, GuestError):
        return RpcError(_CODE_OF_GUEST_ERROR.get(error.code, "invalid_argument"), str(error))
    if isinstance(error, BadRequest):
        return RpcError("invalid_argument", str(error))
    return RpcError("unavailable", str(error))


def frame(payload: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(payload)) + payload


def end_frame(error: RpcError | None = None) -> bytes:
    return frame(b"{}" if error is None else b'{"error":' + error.body() + b"}", END_STREAM)


def to_json(message: Message) -> bytes:
    """What is no Unicode (names of files may be any bytes) becomes `?`."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")


def parse_message(data: bytes) -> Message:
    """Raises `RpcError`."""
    try:
        value = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise RpcError("invalid_argument", f"request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", "request is not a JSON object")
    return value


def parse_frames(buffer: bytearray) -> list[Message]:
    """Take the complete frames off the front of `buffer`. Raises `RpcError`."""
    messages = []
    while len(buffer) >= 5:
        flags, size = struct.unpack_from(">BI", buffer)
        if size > FRAME_LIMIT:
            raise RpcError("resource_exhausted", f"a frame of {size} bytes passes the limit of {FRAME_LIMIT}")
        if flags & 0x01:
            raise RpcError("unimplemented", "compressed frames are not supported")
        if len(buffer) < 5 + size:
            break
        payload = bytes(buffer[5 : 5 + size])
        del buffer[: 5 + size]
        if not flags & END_STREAM:
            messages.append(parse_message(payload))
    return messages


async def stream_messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    """The messages of a client stream. Raises `RpcError`."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        for message in parse_frames(buffer):
            yield message
    if buffer:
        raise RpcError("invalid_argument", "the stream ends within a frame")


def text(message: Mapping[str, Any], name: str, default: str = "") -> str:
    """A string field, by its lowerCamelCase name. Raises `RpcError`."""
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise RpcError("invalid_argument", f"{name} must be a string")
    return value


def number(message: Mapping[str, Any], name: str, default: int = 0) -> int:
    """An integer field; proto-JSON writes it as a number or a string. Raises `RpcError`."""
    value = message.get(name, default)
    try:
        if isinstance(value, bool | float):
            raise ValueError
        return int(value)
    except (TypeError, ValueError) as error:
        raise RpcError("invalid_argument", f"{name} must be an integer") from error


def flag(message: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = message.get(name)
    if value is None:
        value = message.get("".join("_" + c.lower() if c.isupper() else c for c in name), default)
    if not isinstance(value, bool):
        raise RpcError("invalid_argument", f"{name} must be true or false")
    return value


def record(message: Mapping[str, Any], name: str) -> Message:
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", f"{name} must be an object")
    return value
