"""`sandyard serve`: run the server here."""

from __future__ import annotations

import os
import subprocess
from typing import Annotated

import typer

from sandyard.config import Settings, load_settings


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="serve only while CMD runs, with E2B_* set for it")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on [8000]; 0 takes a free one")] = None,
    allow_public: Annotated[
        bool | None, typer.Option("--allow-public", help="listen on a public address without TLS")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="how sandboxes are isolated: container [default]")] = None,
    max_count: Annotated[int | None, typer.Option(help="most sandboxes at once; 0: as many as memory allows")] = None,
    keep_sandboxes: Annotated[
        bool | None, typer.Option("--keep-sandboxes", help="let sandboxes live on when the server stops")
    ] = None,
) -> None:
    """Serve the sandbox API. Stops gracefully on SIGTERM or Ctrl-C."""
    flags = {
        "server.host": host,
        "server.port": port,
        "server.allow_public": allow_public or None,
        "server.keep_sandboxes": keep_sandboxes,
        "sandbox.runtime": runtime,
        "sandbox.max_count": max_count,
    }
    settings = load_settings(flags)
    if command:
        raise typer.Exit(_serve_for(command, settings))
    from sandyard.server.serve import run_server

    run_server(settings)


def _serve_for(command: list[str], settings: Settings) -> int:
    """Run `command` beside a server of its own on a free port; returns its exit code."""
    from sandyard.server.embedded import EmbeddedServer

    with EmbeddedServer(settings) as server:
        return subprocess.run(command, env=os.environ | server.environment(), check=False).returncode
