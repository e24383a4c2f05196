"""Whose fault a failed SDK call is. Nothing here acts on a sandbox; a question to the API is all."""

from __future__ import annotations

import re

import e2b
import httpx

from sandyard.connection import Connection
from sandyard.errors import (
    AgentLinkError,
    BadRequest,
    CapacityError,
    CreateFailed,
    DeathReason,
    NotFound,
    SandboxDied,
    SandyardError,
    Unauthorized,
)

_ASK_TIMEOUT = 10.0
_REFUSED_KEY = (401, 403)
_RETRY_AFTER = re.compile(r"(?:retry|again)[^0-9]{0,20}([0-9]+(?:\.[0-9]+)?) ?s", re.IGNORECASE)


def explain_create(error: Exception, template: str, connection: Connection) -> SandyardError:
    """The error for a create that failed."""
    text = str(error)
    if isinstance(error, e2b.RateLimitException):
        return capacity_error(text)
    status = getattr(error, "status_code", None) or _leading_status(text)
    if isinstance(error, e2b.AuthenticationException) or status in _REFUSED_KEY:
        return _refused(connection, text)
    if status == 404:
        return NotFound(f"template {template!r}: {text}")
    if status in (400, 409, 422):
        return BadRequest(f"create from template {template!r}: {text}")
    if status == 503:
        return capacity_error(text)
    if isinstance(error, httpx.TransportError):
        return CreateFailed("connect", f"{connection.api_url}: {text or type(error).__name__}")
    return CreateFailed("api", text or type(error).__name__)


def capacity_error(text: str) -> CapacityError:
    """With the server's own wait where its message names one."""
    found = _RETRY_AFTER.search(text)
    return CapacityError(f"no room for a sandbox: {text}", retry_after=float(found.group(1)) if found else 1.0)


async def explain_loss(error: Exception, sandbox_id: str, connection: Connection) -> SandyardError:
    """The error for a call that an existing sandbox did not answer, after asking the API about it."""
    detail = str(error) or type(error).__name__
    if isinstance(error, e2b.RateLimitException):
        return capacity_error(detail)
    died = await find_death(sandbox_id, connection, detail)
    return died or AgentLinkError(f"sandbox {sandbox_id} lives but a call to it failed: {detail}")


async def find_death(sandbox_id: str, connection: Connection, detail: str = "") -> SandyardError | None:
    """The death of a sandbox as the API tells it, or `Unauthorized`; None while it lives."""
    try:
        async with httpx.AsyncClient(timeout=_ASK_TIMEOUT) as client:
            answer = await client.get(f"{connection.api_url}/sandboxes/{sandbox_id}", headers=connection.headers())
    except httpx.HTTPError as lost:
        return SandboxDied(sandbox_id, DeathReason.HOST, f"{connection.api_url} does not answer: {lost or detail}")
    if answer.status_code == 404:
        return SandboxDied(sandbox_id, *_death(answer))
    if answer.status_code in _REFUSED_KEY:
        return _refused(connection, detail)
    if answer.status_code in (200, 429):
        return None
    return SandboxDied(sandbox_id, DeathReason.HOST, f"the API answered {answer.status_code}: {detail}")


def _refused(connection: Connection, text: str) -> Unauthorized:
    return Unauthorized(f"{connection.api_url} refused the key: {text}", remedy="check E2B_API_KEY")


def _death(answer: httpx.Response) -> tuple[DeathReason, str]:
    """Reason and detail of a 404. A server that forgot the sandbox was restarted: the host's doing."""
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    code, message = str(body.get("error_code", "")), str(body.get("message", answer.text))
    name = code.removeprefix("sandbox_dead_")
    if code != name and name in set(DeathReason):
        return DeathReason(name), message
    return DeathReason.HOST, f"the server does not know it: {message}"


def _leading_status(text: str) -> int | None:
    head = text[:3]
    return int(head) if head.isdigit() and text[3:4] == ":" else None
