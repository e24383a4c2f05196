"""From the text of a sampled turn to tool calls. A parser never raises: what is wrong is told to the policy."""

from __future__ import annotations

import json
from collections.abc import Callable

from sandyard.train.policies.base import ParsedTurn, ToolCall

Parser = Callable[[str], ParsedTurn]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
CUT = "Error: your turn was cut off before its end; nothing was executed. Write a shorter turn."


def parse_hermes(text: str) -> ParsedTurn:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks (Hermes, Qwen).

    All calls of a turn must parse, else none is executed: `error` then says what to do. Text outside
    the blocks is the content.
    """
    content: list[str] = []
    calls: list[ToolCall] = []
    rest = text
    while _OPEN in rest:
        before, _, rest = rest.partition(_OPEN)
        content.append(before)
        body, close, rest = rest.partition(_CLOSE)
        if not close:
            return ParsedTurn("".join(content).strip(), error=f"Error: {_OPEN} without {_CLOSE}; nothing was executed.")
        call = _parse_call(body)
        if isinstance(call, str):
            return ParsedTurn("".join(content).strip(), error=call)
        calls.append(call)
    content.append(rest)
    stray = next((part for part in content if _CLOSE in part), None)
    if stray is not None:
        return ParsedTurn("".join(content).strip(), error=f"Error: {_CLOSE} without {_OPEN}; nothing was executed.")
    return ParsedTurn("".join(content).strip(), tuple(calls))


def _parse_call(body: str) -> ToolCall | str:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"Error: the tool call is not valid JSON ({error}); nothing was executed."
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return 'Error: a tool call is {"name": ..., "arguments": {...}}; nothing was executed.'
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments of {value['name']} are not valid JSON ({error}); nothing was executed."
    if not isinstance(arguments, dict):
        return f"Error: the arguments of {value['name']} must be a JSON object; nothing was executed."
    return ToolCall(value["name"], arguments)
