"""Observations on the wire. What is ours stands in `metadata`, which every typed client knows.

Typed clients refuse fields that they do not know. Therefore an env that runs programs answers with
exactly `stdout`, `stderr` and `exit_code`, as coding clients expect, and any other with `text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sandyard.envs.base import Execution, StepResult, StepStatus, ToolSpec
from sandyard.envs.observation import render_execution
from sandyard.envs.openenv.protocol import Message


def envelope(result: StepResult, observation: dict[str, Any]) -> Message:
    """The answer to reset or step: reward and done beside the observation."""
    metadata = describe_result(result)
    data = {
        "observation": observation | {"metadata": metadata},
        "reward": result.reward,
        "done": result.done,
        "metadata": metadata,
    }
    return {"type": "observation", "data": data}


def describe_result(result: StepResult) -> dict[str, Any]:
    """What a client of ours needs to have the `StepResult` again."""
    return {
        "text": result.observation,
        "status": str(result.status),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "info": _plain(result.info),
    }


def text_fields(result: StepResult) -> dict[str, Any]:
    return {"text": result.observation}


def code_fields(result: StepResult) -> dict[str, Any]:
    """A tool's answer in the fields of coding clients."""
    failed = result.status is not StepStatus.OK
    code = result.info.get("exit_code")
    return {
        "stdout": "" if failed else result.observation,
        "stderr": result.observation if failed else "",
        "exit_code": code if isinstance(code, int) else int(failed),
    }


def run_result(execution: Execution) -> tuple[StepResult, dict[str, Any]]:
    """A program that ran: what the policy reads, and its streams apart. A signal's exit code is -1."""
    code = -1 if execution.exit_code is None else execution.exit_code
    fields = {"stdout": execution.stdout, "stderr": execution.stderr, "exit_code": code}
    return render_execution(execution), fields


def tool_fields(name: str, result: StepResult) -> dict[str, Any]:
    """The answer to MCP's call as a step. A call that could not be made is an error of the call."""
    failed = result.status is StepStatus.INVALID_CALL
    error = {"error_type": "invalid_args", "message": result.observation} if failed else None
    return {"tool_name": name, "result": tool_result(result), "error": error}


def tool_result(result: StepResult) -> dict[str, Any]:
    """MCP's result of a call, its text also as plain `data`."""
    failed = result.status is not StepStatus.OK
    content = [{"type": "text", "text": result.observation}]
    return {"content": content, "data": result.observation, "isError": failed, "is_error": failed}


def list_fields(specs: Sequence[ToolSpec]) -> dict[str, Any]:
    tools = [{"name": s.name, "description": s.description, "input_schema": dict(s.parameters)} for s in specs]
    return {"tools": tools}


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """What of `info` JSON can hold: it is for logs, and no reason to fail a step."""
    kept = {}
    for key, value in info.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
        kept[str(key)] = value
    return kept
