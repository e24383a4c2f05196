"""Every failure of the control plane as `{code, message, error_code?}`."""

from __future__ import annotations

import math

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sandyard.errors import CapacityError, SandboxDied, SandyardError

log = structlog.get_logger("sandyard.control")


def answer(status: int, message: str, error_code: str | None = None, **headers: str) -> JSONResponse:
    body: dict[str, object] = {"code": status, "message": message}
    if error_code is not None:
        body["error_code"] = error_code
    return JSONResponse(body, status, headers={name.replace("_", "-"): value for name, value in headers.items()})


async def _sandyard(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, SandboxDied):
        reason = error.reason.value
        return answer(404, str(error), f"sandbox_dead_{reason}", x_sandyard_death=reason)
    if isinstance(error, CapacityError):
        return answer(429, str(error), "capacity", retry_after=str(math.ceil(error.retry_after)))
    status = error.http_status if isinstance(error, SandyardError) else 500
    if status >= 500:
        log.error("request failed", error=str(error))
        # A repetition is the caller's decision: the attempt may have cost something.
        return answer(status, str(error), should_retry="false")
    return answer(status, str(error))


async def _validation(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return answer(400, f"body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    field = ".".join(where[1:]) or where[0]
    return answer(400, f"{field}: {first['msg']}")


async def _http(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return answer(error.status_code, str(error.detail))


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.error("internal error", path=request.url.path, exc_info=error)
    return answer(500, "internal error", should_retry="false")


def install(app: FastAPI) -> None:
    app.add_exception_handler(SandyardError, _sandyard)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _bug)
