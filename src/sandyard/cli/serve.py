"""`sandyard serve`: run the server here."""

from __future__ import annotations

from typing import Annotated

import typer

from sandyard.config import load_settings


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on [8000]; 0 takes a free one")] = None,
    allow_public: Annotated[
        bool | None, typer.Option("--allow-public", help="listen on a public address without TLS")
    ] = None,
    runtime: Annotated[str | None, typer.Option(help="how sandboxes are isolated: container [default]")] = None,
    max_count: Annotated[int | None, typer.Option(help="most sandboxes at once; 0: as many as memory allows")] = None,
    keep_sandboxes: Annotated[
        bool, typer.Option("--keep-sandboxes", help="let sandboxes live on when the server stops")
    ] = False,
) -> None:
    """Serve the sandbox API. Stops gracefully on SIGTERM or Ctrl-C."""
    from sandyard.server.serve import run_server

    flags = {
        "server.host": host,
        "server.port": port,
        "server.allow_public": allow_public or None,
        "sandbox.runtime": runtime,
        "sandbox.max_count": max_count,
    }
    raise typer.Exit(run_server(load_settings(flags), keep_sandboxes=keep_sandboxes))
