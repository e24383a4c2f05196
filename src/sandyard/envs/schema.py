"""Tool arguments against the tool's JSON schema, with a text the policy can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.protocols import Validator

from sandyard.errors import BadRequest


def compile_schema(name: str, schema: Mapping[str, Any]) -> Validator:
    """A checker for the arguments of tool `name`.

    Raises `BadRequest` when the schema itself is wrong, is not of an object, or refers elsewhere
    (a `$ref` out of the document would be fetched over the network).
    """
    if schema.get("type") != "object":
        raise BadRequest(f"tool {name}: parameters must be a JSON schema of type object", field="parameters")
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise BadRequest(f"tool {name}: parameters are not JSON: {error}", field="parameters") from error
    return _compile(name, text)


@lru_cache(maxsize=256)
def _compile(name: str, text: str) -> Validator:
    """Every env of a batch has the same tools: checking a schema costs milliseconds, once is enough."""
    schema: dict[str, Any] = json.loads(text)
    if any(not reference.startswith("#") for reference in _references(schema)):
        raise BadRequest(f"tool {name}: a $ref out of its own schema is not allowed", field="parameters")
    kind = jsonschema.Draft202012Validator
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise BadRequest(f"tool {name}: not a JSON schema: {error.message}", field="parameters") from error
    return kind(schema)


def explain_mismatch(validator: Validator, arguments: Mapping[str, Any]) -> str | None:
    """Why `arguments` do not fit, in one line; None when they do."""
    error = best_match(validator.iter_errors(dict(arguments)))
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path)
    message = error.message if len(error.message) <= 300 else error.message[:300] + "…"
    return f"{where}: {message}" if where else message


def _references(node: object) -> list[str]:
    if isinstance(node, Mapping):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [reference for value in node.values() for reference in _references(value)]
    if isinstance(node, list | tuple):
        return [reference for value in node for reference in _references(value)]
    return []
