"""The API's own description: a summary of each endpoint, and the failures it may answer with."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from sandyard.server.control.models import ErrorBody

OPEN = frozenset({"/health", "/metrics"})  # no key is asked for
_WORDS = {
    400: "A parameter or the body is wrong; the message names the field.",
    401: "No API key, more than one, or one that is not known.",
    403: "It belongs to the node or to another tenant, and can be used but not changed.",
    404: "It does not exist, or belongs to another tenant. For a sandbox that died lately `error_code` says why.",
    408: "The body did not come in time.",
    409: "The state does not allow it.",
    413: "The body is too large.",
    429: "There is no room; `Retry-After` says when to try again.",
    500: "The server, its disk or its runtime failed.",
    502: "The sandbox does not answer.",
    503: "What runs inside the sandbox does not answer; nothing happened to it.",
}


def description(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` is to be: made at the first call, when every route is there."""

    def make() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, tags=app.openapi_tags
            )
            _complete(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    return make


def _complete(schema: dict[str, Any]) -> None:
    parts = schema.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        parts.get("schemas", {}).pop(unused, None)
    parts.setdefault("schemas", {})["ErrorBody"] = ErrorBody.model_json_schema()
    parts["securitySchemes"] = {
        "ApiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "Bearer": {"type": "http", "scheme": "bearer"},
    }
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _summarize(operation)
            _name_parts(path, operation)
            _fail(path, method, operation)


def _summarize(operation: dict[str, Any]) -> None:
    """The first sentence of the docstring, rather than the function's name."""
    text = " ".join(operation.get("description", "").split())
    if text:
        operation["summary"] = text.partition(". ")[0].partition("; ")[0].partition(": ")[0].rstrip(".")


def _name_parts(path: str, operation: dict[str, Any]) -> None:
    """Parts of a path that the endpoint itself does not look at are parameters all the same."""
    known = {parameter["name"] for parameter in operation.get("parameters", [])}
    for name in re.findall(r"{(\w+)}", path):
        if name not in known:
            part = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            operation.setdefault("parameters", []).append(part)


def _fail(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would answer; this server answers 400
    if path not in OPEN:
        operation["security"] = [{"ApiKey": []}, {"Bearer": []}]
    for status in sorted(_statuses(path, method, operation)):
        responses.setdefault(str(status), _response(status))


def _statuses(path: str, method: str, operation: dict[str, Any]) -> set[int]:
    body = "requestBody" in operation
    found: set[int] = set() if path in OPEN else {401, 500}
    if body or operation.get("parameters") or method == "post":
        found.add(400)
    if body:
        found |= {408, 413}
    if "{" in path or body:
        found.add(404)
    if "{" in path and "sandbox" in path:
        found.add(502)
    if method in ("post", "put", "patch", "delete") and path not in OPEN:
        found.add(409)
    if method == "post":
        found.add(429)
    if "/templates" in path and (method != "get" or "{template" in path):
        found.add(403)
    return found


def _response(status: int) -> dict[str, Any]:
    reference = {"$ref": "#/components/schemas/ErrorBody"}
    content = {"application/json": {"schema": reference}}
    return {"description": _WORDS.get(status, HTTPStatus(status).phrase), "content": content}
