"""`sandyard mcp`: a sandbox's tools for clients of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

import typer

from sandyard.cli.console import stderr
from sandyard.connection import is_loopback
from sandyard.errors import ConfigError

_TOKEN = "SANDYARD_MCP_TOKEN"


def register(app: typer.Typer) -> None:
    noun = typer.Typer(help="Offer a sandbox's tools to MCP clients.", no_args_is_help=True)
    noun.command("serve")(serve)
    app.add_typer(noun, name="mcp")


def serve(
    transport: Annotated[
        Literal["stdio", "http"], typer.Option(help="stdio: this command's own input and output; http: a URL")
    ] = "stdio",
    template: Annotated[str, typer.Option(help="what the sandbox starts from")] = "base",
    host: Annotated[str, typer.Option(help="http: address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="http: port to listen on; 0 takes a free one", min=0, max=65535)] = 8765,
    idle: Annotated[float, typer.Option(help="seconds without a call after which the sandbox ends", min=10)] = 1800.0,
    command_timeout: Annotated[float, typer.Option(help="seconds that one command may run", min=1)] = 60.0,
) -> None:
    """Serve run_command, run_python, read_file, write_file and list_files of one sandbox.

    The sandbox is made by the first call on the server that E2B_API_URL (or AENV_API_URL) names, and killed at the
    end. SANDYARD_MCP_TOKEN, if set, is a token that every HTTP request must carry; a public address needs one.
    """
    try:
        from sandyard.envs.mcp.server import serve_http, serve_stdio
        from sandyard.envs.mcp.yard import SandboxYard
        from sandyard.envs.sandbox import SandboxEnv
    except ModuleNotFoundError as error:
        raise ConfigError(str(error), remedy="pip install 'sandyard[mcp]'") from error
    token = os.environ.get(_TOKEN) or None
    if transport == "http" and token is None and not is_loopback(host):
        raise ConfigError(
            f"{host} is a public address, and whoever reaches it runs commands in the sandbox",
            remedy=f"listen on 127.0.0.1, or set {_TOKEN}",
        )
    yard = SandboxYard(
        lambda: SandboxEnv(template, sandbox_timeout=idle, command_timeout=command_timeout, metadata={"for": "mcp"}),
        idle,
    )
    if transport == "stdio":
        asyncio.run(serve_stdio(yard))
    else:
        asyncio.run(serve_http(yard, host, port, token, _announce))


def _announce(url: str) -> None:
    stderr.print(f"MCP at {url}", markup=False, highlight=False, soft_wrap=True)
