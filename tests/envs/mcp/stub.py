"""MCP servers that misbehave, as commands: `python stub.py KIND`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND

_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "times": {"type": "integer", "minimum": 1}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = ["echo", "fail", "hang", "die", "big", "picture", "vanish", "count"]


class Stub:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls = 0

    async def list_tools(self, _context: Any, params: Any) -> types.ListToolsResult:
        if self.kind == "endless":
            at = int(params.cursor) if params and params.cursor else 0
            return types.ListToolsResult(tools=[], next_cursor=str(at + 1))
        schema = {"type": "object", "properties": {"x": {"type": "nonsense"}}} if self.kind == "bad-schema" else _SCHEMA
        return types.ListToolsResult(tools=[types.Tool(name=n, description=n, input_schema=schema) for n in TOOLS])

    async def call_tool(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        self.calls += 1
        if self.kind == "changing":
            return await self._change(context, params)
        arguments = params.arguments or {}
        match params.name:
            case "echo":
                return _text(arguments["text"] * arguments.get("times", 1))
            case "fail":
                return _text("no such thing", is_error=True)
            case "hang":
                await asyncio.sleep(3600)
            case "die":
                os._exit(3)
            case "big":
                return _text("é" * 5_000_000)
            case "picture":
                return types.CallToolResult(
                    content=[types.ImageContent(type="image", data="AAAA", mime_type="image/png")]
                )
            case "count":
                return _text(str(self.calls))
        raise RuntimeError("it went away")

    async def _change(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        """From the first call on `echo` wants other arguments, `fail` is gone, and `new` is there."""
        await context.session.send_tool_list_changed()
        if params.name == "fail":
            raise MCPError(METHOD_NOT_FOUND, "no tool fail any more")
        if "number" not in (params.arguments or {}):
            raise MCPError(INVALID_PARAMS, "echo wants a number now")
        return _text("new")


def _text(text: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)


async def main(kind: str) -> None:
    if kind == "silent":
        await asyncio.sleep(3600)
    if kind == "garbage":
        print("this is not the protocol", flush=True)
        await asyncio.sleep(3600)
    stub = Stub(kind)
    server: Server[Any] = Server("stub", on_list_tools=stub.list_tools, on_call_tool=stub.call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
