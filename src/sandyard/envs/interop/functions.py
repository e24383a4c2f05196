"""A tool as a Python function, for those who read a tool's schema from signature and docstring."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from sandyard.envs.base import ToolSpec
from sandyard.errors import BadRequest

_TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def as_function(spec: ToolSpec, call: Callable[..., str], *, method: bool = False) -> Callable[..., str]:
    """`call` (as `call(self, **arguments)` where `method`) under the tool's name, with its parameters as a typed
    signature and its descriptions as a docstring in Google's style.

    Whatever arguments come are passed on: that they fit is the tool's to say. Raises `BadRequest` for a tool
    that no function can look like.
    """
    properties: Mapping[str, Any] = spec.parameters.get("properties", {})
    for name in (spec.name, *properties):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadRequest(f"tool {spec.name}: {name!r} cannot be a name in Python", remedy="rename it")
    required = set(spec.parameters.get("required", ()))

    if method:

        def function(self: Any, **arguments: Any) -> str:
            return call(self, **arguments)

    else:

        def function(**arguments: Any) -> str:  # type: ignore[misc]
            return call(**arguments)

    parameters = [_parameter(name, schema, name in required) for name, schema in properties.items()]
    parameters.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)] if method else []
    function.__signature__ = inspect.Signature([*own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": str}
    function.__name__ = function.__qualname__ = spec.name
    function.__doc__ = _docstring(spec, properties)
    return function


def _parameter(name: str, schema: object, required: bool) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    annotation = _annotation(schema)
    if required:
        return inspect.Parameter(name, kind, annotation=annotation)
    default = schema.get("default") if isinstance(schema, Mapping) else None
    return inspect.Parameter(
        name, kind, default=default, annotation=annotation if default is not None else annotation | None
    )


def _annotation(schema: object) -> Any:
    """The Python type of a JSON schema; `Any` where it says nothing that a type can."""
    if not isinstance(schema, Mapping):
        return Any
    choices = schema.get("enum")
    if choices and all(isinstance(choice, str | int | bool) for choice in choices):
        return Literal[tuple(choices)]
    parts = schema.get("anyOf") or schema.get("oneOf")
    if parts:
        return Union[tuple(_annotation(part) for part in parts)]  # noqa: UP007 - of a list that is known now
    kind = schema.get("type")
    if isinstance(kind, list):
        return Union[tuple(_annotation({**schema, "type": one}) for one in kind)]  # noqa: UP007
    if kind == "array" and "items" in schema:
        return list[_annotation(schema["items"])]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)


def _docstring(spec: ToolSpec, properties: Mapping[str, Any]) -> str:
    lines = [" ".join(spec.description.split()) or spec.name]
    if properties:
        lines += ["", "Args:"]
    for name, schema in properties.items():
        text = schema.get("description", "") if isinstance(schema, Mapping) else ""
        lines.append(f"    {name}: {' '.join(str(text).split()) or name}")
    return "\n".join(lines)
