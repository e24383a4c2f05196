"""Every failure of the control plane as `{code, message, error_code?}`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from sandyard.errors import CapacityError, SandboxDied, SandyardError

log = structlog.get_logger("sandyard.control")

MESSAGE_LIMIT = 4000
NEVER_AGAIN = {"should-retry": "false"}  # a repetition is the caller's decision: the attempt may have cost something


def answer(
    status: int, message: str, error_code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    # It may quote what was sent: half of a surrogate pair, which JSON cannot hold, or very much.
    told = message.encode("utf-8", "replace").decode()
    body: dict[str, object] = {
        "code": status,
        "message": told if len(told) <= MESSAGE_LIMIT else told[:MESSAGE_LIMIT] + "…",
    }
    if error_code is not None:
        body["error_code"] = error_code
    return JSONResponse(body, status, headers=dict(headers or {}))


def answer_error(error: SandyardError) -> JSONResponse:
    """The answer to an error of ours; what is the server's fault is logged."""
    if isinstance(error, SandboxDied):
        reason = error.reason.value
        return answer(404, str(error), f"sandbox_dead_{reason}", {"x-sandyard-death": reason})
    if isinstance(error, CapacityError):
        # No Should-Retry: without it SDKs retry a 429, after so long.
        return answer(429, str(error), "capacity", {"retry-after": str(math.ceil(error.retry_after))})
    if error.http_status >= 500:
        log.error("request failed", error=str(error))
        return answer(error.http_status, str(error), headers=NEVER_AGAIN)
    return answer(error.http_status, str(error))


async def _sandyard(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SandyardError)
    return answer_error(error)


async def _validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return answer(400, f"body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    field = ".".join(where[1:]) or where[0]
    return answer(400, f"{field}: {first['msg']}")


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and error.detail == "Not Found":
        return answer(404, _unknown(request))
    if error.status_code == 405:
        methods = _methods(request)
        allowed = ", ".join(methods)
        message = f"{request.method} is not what {request.url.path} takes; it takes {allowed}"
        return answer(405, message, headers={"allow": allowed})
    return answer(error.status_code, str(error.detail), headers=error.headers)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("internal error", path=request.url.path, exc_info=error)
    return answer(500, "internal error", headers=NEVER_AGAIN)


def _unknown(request: Request) -> str:
    path = request.url.path
    known = {str(getattr(route, "path", "")) for route in request.app.state.routes}
    near = difflib.get_close_matches(path[:200], known, n=1, cutoff=0.8)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{request.method} {path} is no endpoint of this server{hint}"


def _methods(request: Request) -> list[str]:
    found: set[str] = set()
    for route in request.app.state.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= set(getattr(route, "methods", None) or ())
    return sorted(found)


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """`routes` are all that the application answers: what an unknown path or method is told about."""
    app.state.routes = routes
    app.add_exception_handler(SandyardError, _sandyard)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)
