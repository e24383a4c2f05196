"""`sandyard serve`: run the server here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
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
    domain: Annotated[
        str | None, typer.Option(help="serve sandboxes as {port}-{id}.DOMAIN and the API as api.DOMAIN")
    ] = None,
    tls_port: Annotated[int | None, typer.Option(help="serve HTTPS too, on this port; 0 takes a free one")] = None,
    tls_host: Annotated[str | None, typer.Option(help="address of the TLS port [that of --host]")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate for *.DOMAIN [one of a CA made in the state directory]")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate")] = None,
    runtime: Annotated[
        str | None, typer.Option(help="container, or microvm after `sandyard setup microvm` [container]")
    ] = None,
    max_count: Annotated[int | None, typer.Option(help="most sandboxes at once; 0: as many as memory allows")] = None,
    egress: Annotated[
        bool | None, typer.Option("--egress", help="let sandboxes reach the internet, as their policy says")
    ] = None,
    keep_sandboxes: Annotated[
        bool | None, typer.Option("--keep-sandboxes", help="let sandboxes live on when the server stops")
    ] = None,
) -> None:
    """Serve the sandbox API. Stops gracefully on SIGTERM or Ctrl-C."""
    flags = {
        "server.host": host,
        "server.port": port,
        "server.allow_public": allow_public or None,
        "server.domain": domain,
        "server.tls_port": tls_port,
        "server.tls_host": tls_host,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
        "network.egress": "on" if egress else None,
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
