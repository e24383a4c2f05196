"""OpenEnv's messages: JSON texts, each an envelope of `type` and `data`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
KINDS = ("reset", "step", "state", "close", "mcp")
_WITH_DATA = ("step", "mcp")


class ErrorCode(StrEnum):
    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class Fault(Exception):
    """A request that is answered with an error message; the session goes on."""

    def __init__(self, code: ErrorCode, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.more = more

    def to_message(self) -> Message:
        return error_message(self.code, str(self), **self.more)


@dataclass(frozen=True, slots=True)
class Request:
    kind: str
    data: Mapping[str, Any]


def parse_request(text: str) -> Request:
    """The request in `text`. Raises `Fault` with the code that the protocol has for what is wrong."""
    body = _parse_json(text)
    if not isinstance(body, dict):
        raise Fault(ErrorCode.VALIDATION_ERROR, f"a message is a JSON object, not {type(body).__name__}")
    kind = body.get("type", "")
    if kind not in KINDS:
        raise Fault(ErrorCode.UNKNOWN_TYPE, f"unknown message type {kind!r:.100}; known: {', '.join(KINDS)}")
    extra = set(body) - {"type", "data"}
    if extra:
        raise Fault(ErrorCode.VALIDATION_ERROR, f"{kind}: {', '.join(sorted(extra))[:200]} do not belong here")
    data = body.get("data", None if kind in _WITH_DATA else {})
    if not isinstance(data, dict):
        raise Fault(ErrorCode.VALIDATION_ERROR, f"{kind}: data must be an object, not {type(data).__name__}")
    return Request(kind, data)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Fault(ErrorCode.INVALID_JSON, f"not JSON: {error}") from error


def error_message(code: ErrorCode, message: str, **more: Any) -> Message:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def capacity_message(active: int, most: int) -> Message:
    text = f"no room: {active} of {most} sessions are in use; try again later"
    return error_message(ErrorCode.CAPACITY_REACHED, text, active_sessions=active, max_sessions=most)


def dump(message: Message) -> str:
    """Raises `Fault` for what JSON cannot hold: an env's answer is not made up."""
    try:
        return json.dumps(message, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(ErrorCode.EXECUTION_ERROR, f"the env's answer is not JSON: {error}") from error
