"""Actions as clients send them: our tool calls, MCP as steps, and the plain fields of typed clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sandyard.envs.base import ToolSpec
from sandyard.envs.openenv.protocol import ErrorCode, Fault


class ActionForm(StrEnum):
    TOOL = "tool"  # {"tool": name, "arguments": {…}}
    CALL_TOOL = "call_tool"  # MCP as a step
    LIST_TOOLS = "list_tools"
    PLAIN = "plain"  # the arguments alone: {"code": …}


@dataclass(frozen=True, slots=True)
class Action:
    form: ActionForm
    tool: str = ""
    arguments: Mapping[str, Any] | None = None


def read_action(data: Mapping[str, Any], specs: Sequence[ToolSpec]) -> Action:
    """The action in a step's `data`. Raises `Fault` (VALIDATION_ERROR) saying what was expected.

    Plain fields are the call of the first tool that knows them all and requires no others.
    """
    fields = {name: value for name, value in data.items() if name != "metadata"}
    kind = fields.get("type")
    if kind == ActionForm.LIST_TOOLS and set(fields) == {"type"}:
        return Action(ActionForm.LIST_TOOLS)
    if kind == ActionForm.CALL_TOOL and set(fields) <= {"type", "tool_name", "arguments"}:
        return _named(ActionForm.CALL_TOOL, fields.get("tool_name"), fields.get("arguments", {}))
    if "tool" in fields and set(fields) <= {"tool", "arguments"}:
        return _named(ActionForm.TOOL, fields["tool"], fields.get("arguments", {}))
    for spec in specs:
        if _fits(spec, fields):
            return Action(ActionForm.PLAIN, spec.name, fields)
    names = ", ".join(spec.name for spec in specs) or "none"
    raise Fault(
        ErrorCode.VALIDATION_ERROR,
        f'step: send {{"tool": name, "arguments": {{…}}}}; the tools are {names}; got {", ".join(fields)[:200]}',
    )


def _named(form: ActionForm, tool: object, arguments: object) -> Action:
    if not isinstance(tool, str):
        raise Fault(ErrorCode.VALIDATION_ERROR, f"step: the tool's name must be a text, not {type(tool).__name__}")
    if not isinstance(arguments, dict):
        raise Fault(ErrorCode.VALIDATION_ERROR, f"step: arguments must be an object, not {type(arguments).__name__}")
    return Action(form, tool, arguments)


def _fits(spec: ToolSpec, fields: Mapping[str, Any]) -> bool:
    known = set(spec.parameters.get("properties", {}))
    return bool(fields) and set(fields) <= known and set(spec.parameters.get("required", ())) <= set(fields)


def action_schema(specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """What `/schema` tells of actions; plain forms are accepted beside it."""
    names = [spec.name for spec in specs]
    return {
        "title": "ToolAction",
        "type": "object",
        "properties": {
            "tool": {"type": "string", "enum": names},
            "arguments": {"type": "object"},
            "metadata": {"type": "object"},
        },
        "required": ["tool"],
        "additionalProperties": False,
        "tools": [spec.to_openai() for spec in specs],
    }
