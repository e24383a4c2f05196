"""A sandbox's tools over MCP, by standard input and output or by streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from sandyard.connection import is_loopback
from sandyard.envs.mcp.content import to_content
from sandyard.envs.mcp.yard import SandboxYard

INSTRUCTIONS = (
    "The tools act in one Linux sandbox, which the first call makes. Its files stay until it is idle for too long; "
    "every command and every Python program is a process of its own."
)
PATH = "/mcp"


def make_server(yard: SandboxYard) -> Server[dict[str, Any]]:
    """The protocol over `yard`. Each connection has the same sandbox."""

    async def list_tools(_context: Any, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        tools = [
            types.Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
            for spec in yard.tools()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return to_content(await yard.call(params.name, params.arguments or {}))

    return Server(
        "sandyard",
        version=version("sandyard"),
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def serve_stdio(yard: SandboxYard) -> None:
    """Serve until standard input ends, or SIGTERM or SIGINT; then the sandbox is gone."""
    server = make_server(yard)
    ending: list[asyncio.Task[None]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: ending.append(asyncio.create_task(_end(yard))))
    async with _closing(yard), stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


async def _end(yard: SandboxYard) -> None:
    await yard.close()
    # A thread that waits for standard input would have everybody wait for it, and the end of an interpreter with
    # threads of libraries was seen to abort.
    os._exit(0)


async def serve_http(
    yard: SandboxYard, host: str, port: int, token: str | None, started: Callable[[str], None]
) -> None:
    """Serve at `http://HOST:PORT/mcp` until SIGTERM or SIGINT; `started(url)` is called once it listens.

    With a `token` every request must carry it (`Authorization: Bearer`). A browser's page of another origin is
    refused on a loopback address, whatever name it found for it. Raises `SystemExit` where the port is taken."""
    app: ASGIApp = make_server(yard).streamable_http_app(
        streamable_http_path=PATH, host=host, transport_security=_security(host)
    )
    if token is not None:
        app = _Bearer(app, token)
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="on", timeout_graceful_shutdown=5)
    server = _Announcing(config, started)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    async with _closing(yard):
        await server.serve()
    await _end(yard)


class _Announcing(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[str], None]) -> None:
        super().__init__(config)
        self._started = started

    def stop(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Its own way with signals ends this process before the sandbox is gone."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self._started(f"http://{host}:{port}{PATH}")


class _Bearer:
    """Lets only those in who know the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"a bearer token is needed\n"})


def _security(host: str) -> TransportSecuritySettings | None:
    """None is the library's own choice for a loopback address; elsewhere the token guards."""
    return None if is_loopback(host) else TransportSecuritySettings(enable_dns_rebinding_protection=False)


@contextlib.asynccontextmanager
async def _closing(yard: SandboxYard) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await yard.close()
