"""The server a command works with: the one that was named, else one of its own for the time it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from sandyard.cli.console import stderr
from sandyard.config import load_settings
from sandyard.connection import Connection, resolve_connection


@contextlib.contextmanager
def yard(api_url: str | None = None) -> Iterator[Connection]:
    """Yield a connection to the server named by flag or environment, else to an embedded one."""
    if api_url or os.environ.get("AENV_API_URL") or os.environ.get("E2B_API_URL"):
        yield resolve_connection(api_url)
        return
    from sandyard.server.embedded import EmbeddedServer

    stderr.print("[dim]no server named: starting one on a free port for this run[/dim]")
    with EmbeddedServer(load_settings()) as server:
        yield Connection(server.url, server.api_key, server.url)
