"""How a server takes actions, found from its schema: our tool calls, MCP as steps, or plain fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sandyard.envs.base import StepResult, StepStatus, ToolSpec
from sandyard.envs.openenv.protocol import Message
from sandyard.errors import BadRequest

STEP_TOOL = "step"  # the one tool of a server that takes plain fields


class Dialect(StrEnum):
    TOOL = "tool"
    MCP = "mcp"
    FIELDS = "fields"


def find_dialect(action_schema: Mapping[str, Any]) -> Dialect:
    """By the fields of the action's schema."""
    fields = action_schema.get("properties", {})
    if "tool" in fields and "arguments" in fields:
        return Dialect.TOOL
    return Dialect.MCP if "tool_name" in fields else Dialect.FIELDS


def step_data(dialect: Dialect, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if dialect is Dialect.TOOL:
        return {"tool": tool, "arguments": dict(arguments)}
    if dialect is Dialect.MCP:
        return {"type": "call_tool", "tool_name": tool, "arguments": dict(arguments)}
    return dict(arguments)


def fields_tool(action_schema: Mapping[str, Any], name: str) -> ToolSpec:
    """The one tool of a plain server: its action's fields are the arguments."""
    properties = {key: value for key, value in action_schema.get("properties", {}).items() if key != "metadata"}
    parameters = {key: value for key, value in action_schema.items() if key in ("$defs", "required")}
    parameters |= {"type": "object", "properties": properties, "additionalProperties": False}
    return ToolSpec(STEP_TOOL, str(action_schema.get("description") or f"Act in {name}."), parameters)


def read_tools(listed: object) -> list[ToolSpec]:
    """The tools of a `list_tools` answer. Raises `BadRequest` for what is none."""
    specs = []
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise BadRequest("the server lists a tool without a name")
        schema = entry.get("input_schema") or entry.get("inputSchema") or {}
        parameters = {"type": "object", "properties": {}} | (schema if isinstance(schema, dict) else {})
        specs.append(ToolSpec(name, str(entry.get("description") or ""), parameters))
    return specs


def read_result(message: Message) -> StepResult:
    """The `StepResult` of an observation message. `info` is the server's own where it is ours; of any
    other it holds what came: `observation` and `metadata`.

    `done` of a server that does not tell the two apart is `terminated`.
    """
    data = message["data"]
    observation = data.get("observation")
    fields: dict[str, Any] = observation if isinstance(observation, dict) else {"text": observation}
    metadata = data.get("metadata") or fields.get("metadata") or {}
    told = metadata if isinstance(metadata, dict) else {}
    done = data.get("done") is True
    truncated = done and told.get("truncated") is True
    ours = told.get("info")
    info = ours if isinstance(ours, dict) else {"observation": fields, "metadata": told}
    return StepResult(
        observation=_text(fields, told),
        reward=_reward(data.get("reward")),
        terminated=done and (not truncated or told.get("terminated") is True),
        truncated=truncated,
        status=_status(fields, told),
        info=info,
    )


def _reward(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float):  # a bool is 0 or 1 here: the protocol's rewards may be bools
        raise BadRequest(f"the server's reward is {value!r:.100}, not a number", field="reward")
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise BadRequest(f"the server's reward is {number}: not finite", field="reward")
    return number


def _status(fields: Mapping[str, Any], told: Mapping[str, Any]) -> StepStatus:
    status = told.get("status")
    if status in set(StepStatus):
        return StepStatus(status)
    if fields.get("error"):
        return StepStatus.INVALID_CALL
    return StepStatus.TASK_FAILED if fields.get("exit_code") not in (None, 0) else StepStatus.OK


def _text(fields: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """One text for the policy: what the server calls text, a tool's result, a program's output, else all as JSON."""
    if isinstance(told.get("text"), str):
        return str(told["text"])
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    if "result" in fields or "error" in fields:
        return _tool_text(fields)
    if "stdout" in fields:
        streams = [str(fields.get("stdout") or "").rstrip("\n"), str(fields.get("stderr") or "").rstrip()]
        return "\n".join(part for part in streams if part) or "(no output)"
    shown = {key: value for key, value in fields.items() if key != "metadata" and value is not None}
    return json.dumps(shown, ensure_ascii=False) if shown else ""


def _tool_text(fields: Mapping[str, Any]) -> str:
    error = fields.get("error")
    if error:
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    result = fields.get("result")
    if isinstance(result, dict) and "data" in result:
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def plain_reset(metadata: Mapping[str, Any], episode_id: str) -> dict[str, Any]:
    """What of a task any server may know: its seed and name, and such metadata as JSON can hold."""
    data: dict[str, Any] = {"episode_id": episode_id}
    for key, value in metadata.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"metadata {key!r} of task {episode_id} is not JSON: {error}", field=key) from error
        data[key] = value
    return data
