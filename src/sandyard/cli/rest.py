"""Calls of the API that the SDK has no word for, with failures that say what to do."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from sandyard.connection import resolve_connection
from sandyard.errors import BadRequest, CapacityError, Conflict, NotFound, SandyardError, Unauthorized

SECONDS = 180.0  # a pause or a fork writes what the sandbox holds
_NO_KEY = "run `sandyard auth` or set E2B_API_KEY"
_NO_SANDBOX = "`sandyard list` shows what lives"


def call(method: str, path: str, **options: Any) -> httpx.Response:
    """The answer to a request, if it is a success.

    Raises `NotFound`, `Conflict`, `BadRequest`, `Unauthorized`, `CapacityError`, else `SandyardError`,
    with the server's own message."""
    connection = resolve_connection()
    answer = httpx.request(
        method, f"{connection.api_url}{path}", headers=connection.headers(), timeout=SECONDS, **options
    )
    if answer.is_success:
        return answer
    raise _error(answer)


def lives(sandbox_id: str) -> bool:
    """Whether there is such a sandbox, running or paused."""
    try:
        call("GET", f"/sandboxes/{word(sandbox_id)}")
    except NotFound:
        return False
    return True


def word(text: str) -> str:
    """Text as one part of a path."""
    return quote(text, safe="")


def _error(answer: httpx.Response) -> SandyardError:
    message = _message(answer)
    remedy = _NO_KEY if answer.status_code == 401 else None
    if answer.status_code == 404 and "/sandboxes/" in answer.request.url.path:  # of others it says what there is
        remedy = _NO_SANDBOX
    kinds: dict[int, type[NotFound | Conflict | BadRequest | Unauthorized]] = {
        400: BadRequest,
        401: Unauthorized,
        404: NotFound,
        409: Conflict,
    }
    if answer.status_code == 429:
        return CapacityError(message)
    kind = kinds.get(answer.status_code)
    if kind is None:
        return SandyardError(f"the server answered {answer.status_code}: {message}")
    return kind(message, remedy=remedy)


def _message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip()[:500] or answer.reason_phrase
    return str(body.get("message", body)) if isinstance(body, dict) else str(body)
