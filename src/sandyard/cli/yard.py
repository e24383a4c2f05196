"""The server a command works with: the one that was named, else the one that runs here, else one of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import httpx

from sandyard.cli.console import stderr
from sandyard.config import load_settings
from sandyard.connection import LOCAL_URL, Connection, local_key, named_url, read_credentials, resolve_connection


@contextlib.contextmanager
def yard(api_url: str | None = None) -> Iterator[Connection]:
    """Yield a connection. A server that this starts ends with the context."""
    if api_url or named_url(os.environ) or os.environ.get("E2B_DOMAIN") or read_credentials(os.environ):
        connection = resolve_connection(api_url)
        stderr.print(f"[dim]using the server at {connection.api_url}[/dim]")
        yield connection
        return
    local = _running_here()
    if local is not None:
        stderr.print(f"[dim]using the server that runs here, {LOCAL_URL}[/dim]")
        yield local
        return
    from sandyard.server.embedded import EmbeddedServer

    stderr.print("[dim]no server named: starting one on a free port for this run[/dim]")
    with EmbeddedServer(load_settings()) as server:
        yield Connection.to(server)


def _running_here() -> Connection | None:
    """A server on this machine that takes the key it generated here."""
    key = local_key(load_settings())
    if key is None:
        return None
    connection = Connection(LOCAL_URL, key, LOCAL_URL)
    try:
        answer = httpx.get(f"{LOCAL_URL}/capacity", headers=connection.headers(), timeout=2)
    except httpx.TransportError:
        return None
    return connection if answer.status_code == 200 else None
