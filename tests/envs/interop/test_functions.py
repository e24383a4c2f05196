"""Tools as functions: what a reader of signatures and docstrings finds is the tool's own schema."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import get_json_schema

from sandyard.envs.base import ToolSpec
from sandyard.envs.code import RUN_PYTHON
from sandyard.envs.embedded.maze import WALK
from sandyard.envs.interop.functions import as_function
from sandyard.errors import BadRequest

EVERYTHING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "count": {"type": "integer", "description": "How many,\n  at most."},
        "share": {"type": "number"},
        "deep": {"type": "boolean", "default": True},
        "names": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "maybe": {"type": ["string", "null"]},
        "how": {"type": "string", "enum": ["up", "down"]},
    },
    "required": ["count", "share", "names", "more", "either", "how"],
}


def schema_of(spec: ToolSpec) -> dict[str, Any]:
    function = as_function(spec, lambda **arguments: "")
    found: dict[str, Any] = get_json_schema(function)["function"]
    return found


@pytest.mark.parametrize("spec", [RUN_PYTHON, WALK])
def test_a_tools_schema_comes_back(spec: ToolSpec) -> None:
    found = schema_of(spec)
    assert (found["name"], found["description"]) == (spec.name, spec.description)
    properties = {name: {"description": name, **schema} for name, schema in spec.parameters["properties"].items()}
    assert found["parameters"] == {
        "type": "object",
        "properties": properties,
        "required": spec.parameters["required"],
    }


def test_every_type() -> None:
    found = schema_of(ToolSpec("all", "  Does\n all.", EVERYTHING))
    assert found["description"] == "Does all."
    parameters = found["parameters"]
    assert sorted(parameters["required"]) == sorted(EVERYTHING["required"])
    shapes = {
        name: {k: v for k, v in schema.items() if k != "description"}
        for name, schema in parameters["properties"].items()
    }
    assert shapes == {
        "note": {"type": "string", "nullable": True},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "more": {"type": "object"},
        "either": {"type": ["integer", "string"]},
        "maybe": {"type": "string", "nullable": True},
        "how": {"type": "string", "enum": ["up", "down"]},
    }
    assert parameters["properties"]["count"]["description"] == "How many, at most."


def test_no_arguments_and_no_words() -> None:
    found = schema_of(ToolSpec("stand", "", {"type": "object", "properties": {}}))
    assert (found["name"], found["description"]) == ("stand", "stand")


@pytest.mark.parametrize("name", ["run-python", "class", "1st", ""])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="cannot be a name in Python"):
        as_function(ToolSpec(name, "", {"type": "object"}), lambda **arguments: "")
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(BadRequest, match="cannot be a name in Python"):
        as_function(ToolSpec("tool", "", parameters), lambda **arguments: "")
