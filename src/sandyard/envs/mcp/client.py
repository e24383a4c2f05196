"""The tools of an MCP server, as tools of a trajectory.

A connection is lost once and for all: the server behind a new one may have forgotten what the calls before
it did, so nothing reconnects by itself and no call is made twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import mcp_types as types
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError
from mcp_types.jsonrpc import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND

from sandyard.envs.base import StepResult, StepStatus, ToolSpec
from sandyard.envs.mcp.content import render_content
from sandyard.envs.observation import DEFAULT_LIMIT
from sandyard.envs.tools import EnvTool, ToolHandler, invalid_call
from sandyard.errors import AgentLinkError, BadRequest, SandyardError

T = TypeVar("T")
_CONNECT_SECONDS = 30.0
_CLOSE_SECONDS = 15.0
_MAX_PAGES = 100
_POLICY_CODES = (INVALID_PARAMS, METHOD_NOT_FOUND)  # what it asked for is not there, or not so


class McpLost(AgentLinkError):
    """The connection to an MCP server is gone, or what came over it is not the protocol."""


class McpConnection:
    """A session with the server at a URL (streamable HTTP), or with a command that speaks over its stdio.

    `connect` and `close` from any task. After a failure every call raises `McpLost`; only `connect` of a new
    object begins another session."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        connect_timeout: float = _CONNECT_SECONDS,
    ) -> None:
        """`headers` go with every request to a URL; `env` is what a command's process has beyond PATH, HOME and
        such. Raises `BadRequest`."""
        command = shlex.split(server) if isinstance(server, str) else list(server)
        if not command:
            raise BadRequest("no MCP server", remedy="give a URL or a command")
        self.name = command[0]
        self._url = command[0] if command[0].startswith(("http://", "https://")) else None
        if self._url is not None and len(command) > 1:
            raise BadRequest(f"an MCP server's URL with something behind it: {' '.join(command[1:])[:100]}")
        self._command = command
        self._headers, self._env = dict(headers or {}), dict(env or {})
        self._connect_timeout = connect_timeout
        self._client: Client | None = None
        self._lost: str | None = None
        self._stop = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Raises `McpLost` saying why there is no session."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whatever the client opens it must close in the task that opened it.
        self._holder = asyncio.create_task(self._hold(ready))
        try:
            async with asyncio.timeout(self._connect_timeout):
                await asyncio.shield(ready)
        except TimeoutError:
            lost = self._lose(f"it did not answer within {self._connect_timeout:g} s")
            await self.close()
            raise lost from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Idempotent, bounded in time; a command's process is ended."""
        self._lost = self._lost or "it was closed"
        self._stop.set()
        if self._holder is None:
            return
        if self._client is None:  # not connected yet
            self._holder.cancel()
        done, _ = await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)
        if not done:
            self._holder.cancel()
            await asyncio.wait([self._holder], timeout=_CLOSE_SECONDS)

    async def list_tools(self) -> Sequence[types.Tool]:
        """All of them, as they are now. Raises `McpLost`."""
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._ask(partial(Client.list_tools, cursor=cursor, cache_mode="bypass"))
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise self._lose(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Do one call. Raises `MCPError` where the server refuses it, and `McpLost`."""
        return await self._ask(partial(Client.call_tool, name=name, arguments=dict(arguments)))

    async def _ask(self, do: Callable[[Client], Awaitable[T]]) -> T:
        if self._lost is not None or self._client is None:
            raise McpLost(f"MCP server {self.name}: {self._lost or 'it was never connected'}")
        assert self._holder is not None  # it is what sets the client
        asking = asyncio.ensure_future(do(self._client))
        try:
            await asyncio.wait([asking, self._holder], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise self._lose(self._lost or "the connection ended in mid call")
            return asking.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise self._lose("the connection ended in mid call") from error
            raise
        except (SandyardError, asyncio.CancelledError):
            raise
        except Exception as error:  # the transport's and the parsers' own, of many kinds
            raise self._lose(f"{type(error).__name__}: {error}") from error
        finally:
            asking.cancel()

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(Client(await self._transport(stack)))
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - the transport's own, of many kinds; told to whoever waits or calls
            lost = self._lose(_innermost(error))
            if not ready.done():
                ready.set_exception(lost)
        finally:
            ready.cancel()
            self._lost = self._lost or "the connection ended"

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        if self._url is None:
            command, *args = self._command
            return stdio_client(StdioServerParameters(command=command, args=args, env=self._env or None))
        http = await stack.enter_async_context(create_mcp_http_client(headers=self._headers))
        return streamable_http_client(self._url, http_client=http)

    def _lose(self, why: str) -> McpLost:
        self._lost = self._lost or why
        self._stop.set()
        return McpLost(f"MCP server {self.name}: {self._lost}")


@contextlib.asynccontextmanager
async def mcp_tools(
    server: str | Sequence[str],
    *,
    include: Collection[str] | None = None,
    timeout: float = 60.0,
    observation_limit: int = DEFAULT_LIMIT,
    headers: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    connect_timeout: float = _CONNECT_SECONDS,
) -> AsyncIterator[list[EnvTool]]:
    """The tools of an MCP server while the context lasts; only those named in `include`, if it is given.

    Arguments are checked against the server's schemas before a call. A tool's own error is TASK_FAILED, a call
    that takes longer than `timeout` seconds TIMEOUT, a server that is gone raises `McpLost`: that is nobody's
    action. Raises `McpLost`, and `BadRequest` for a tool that is not there or has a schema that cannot be used."""
    connection = McpConnection(server, headers=headers, env=env, connect_timeout=connect_timeout)
    await connection.connect()
    try:
        found = {tool.name: tool for tool in await connection.list_tools()}
        missing = sorted(set(include or ()) - found.keys())
        if missing:
            raise BadRequest(
                f"MCP server {connection.name} has no tool {', '.join(missing)}; it has: {', '.join(found)}"
            )
        wanted = [tool for name, tool in found.items() if include is None or name in include]
        yield [_tool(connection, tool, timeout, observation_limit) for tool in wanted]
    finally:
        await asyncio.shield(connection.close())


def _tool(connection: McpConnection, tool: types.Tool, timeout: float, observation_limit: int) -> EnvTool:
    spec = ToolSpec(tool.name, tool.description or "", tool.input_schema)
    return EnvTool(spec, _handler(connection, tool.name), timeout=timeout, observation_limit=observation_limit)


def _handler(connection: McpConnection, name: str) -> ToolHandler:
    async def call(arguments: Mapping[str, Any]) -> StepResult:
        try:
            result = await connection.call(name, arguments)
        except MCPError as error:
            if error.code in _POLICY_CODES:
                return invalid_call(f"{name}: {error.message}")
            raise McpLost(f"MCP server {connection.name}: {name}: error {error.code}: {error.message}") from error
        status = StepStatus.TASK_FAILED if result.is_error else StepStatus.OK
        return StepResult(observation=render_content(result), status=status)

    return call


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
