"""`sandyard auth`: store where the server is and the key."""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer

from sandyard.cli.console import stdout
from sandyard.config import load_settings
from sandyard.connection import LOCAL_URL, Connection, local_key, write_credentials
from sandyard.errors import Unauthorized


def register(app: typer.Typer) -> None:
    app.command("auth")(auth)


def auth(
    url: Annotated[str | None, typer.Option(help="URL of the server; asked for when not given")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key; asked for when not given")] = None,
) -> None:
    """Store the server's URL and an API key (mode 0600), after trying them."""
    url = (url or typer.prompt("Server URL", default=LOCAL_URL)).rstrip("/")
    known = local_key(load_settings()) if url == LOCAL_URL else None
    key = api_key or known or typer.prompt("API key", hide_input=True)
    connection = Connection(url, key, url)
    check_key(connection)
    path = write_credentials(connection, os.environ)
    stdout.print(f"{url} accepts the key; stored in {path}")


def check_key(connection: Connection) -> None:
    """Ask the server something that needs the key. Raises `Unauthorized` when it is refused."""
    answer = httpx.get(f"{connection.api_url}/v2/sandboxes?limit=1", headers=connection.headers(), timeout=10)
    if answer.status_code == 401:
        raise Unauthorized(
            f"{connection.api_url} refuses this key",
            remedy="the server's own key lies in secrets/api-key below its state folder",
        )
    answer.raise_for_status()
