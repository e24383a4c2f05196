"""Content of the protocol as text for a policy, and back."""

from __future__ import annotations

import json

import mcp_types as types

from sandyard.envs.base import StepResult, StepStatus


def render_content(result: types.CallToolResult) -> str:
    """The text of an answer. What is no text is named with its type and size: a policy reads characters."""
    parts = [_part(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or "(no output)"


def _part(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.ImageContent() | types.AudioContent():
            return f"[{block.type} {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.EmbeddedResource():
            return f"[resource {block.resource.uri}]"
    return f"[{block.type} {block.uri}]"


def to_content(result: StepResult) -> types.CallToolResult:
    """An answer of ours, where everything but OK is an error."""
    text = types.TextContent(type="text", text=result.observation)
    return types.CallToolResult(content=[text], is_error=result.status is not StepStatus.OK)
