"""A server of this tree for one part: on a free port, by URL or by host name with TLS.

Its sandboxes are of the runtime that `sandbox.runtime` of the caller's own settings names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import ImageSettings, Settings, load_settings
from sandyard.server.embedded import EmbeddedServer
from tests.compat.names import name_server, with_names
from tests.yard import guest_settings, node_home, node_settings

DOMAIN = "sbx.test"


@dataclass(frozen=True, slots=True)
class Target:
    """`env` leads an SDK to the server; `names` is the name server to ask, empty for the host's own."""

    env: Mapping[str, str]
    home: Path
    names: str = ""

    def command(self, words: Sequence[str | Path]) -> list[str]:
        plain = [str(word) for word in words]
        return with_names(plain, self.names, self.home) if self.names else plain


@contextmanager
def by_url(images: ImageSettings | None = None, *, internet: bool = False) -> Iterator[Target]:
    """The server is found by `E2B_API_URL` and `E2B_SANDBOX_URL`. `images`: where it pulls from; `internet`:
    whether its sandboxes may reach it."""
    with node_home() as home:
        settings = _settings(home)
        network = settings.network.model_copy(update={"egress": "on" if internet else "off"})
        settings = settings.model_copy(update={"images": images or ImageSettings(), "network": network})
        with EmbeddedServer(settings) as server:
            yield Target(server.environment(), home)


@contextmanager
def of_guests() -> Iterator[Target]:
    """As `by_url`, over microVMs."""
    with node_home() as home:
        settings = asyncio.run(guest_settings(node_settings(home, low=0, high=2)))
        with EmbeddedServer(settings, ready_seconds=300.0) as server:
            yield Target(server.environment(), home)


@contextmanager
def by_host_name(images: ImageSettings | None = None) -> Iterator[Target]:
    """The server is found by `E2B_DOMAIN`: `api.` and `{port}-{id}.` below a domain, over TLS of its own CA."""
    with ExitStack() as held:
        home = held.enter_context(node_home())
        settings = _settings(home)
        port = _free_port()
        where = {"domain": f"{DOMAIN}:{port}", "tls_port": port}
        changes = {"server": settings.server.model_copy(update=where), "images": images or ImageSettings()}
        settings = settings.model_copy(update=changes)
        server = held.enter_context(EmbeddedServer(settings))
        names = held.enter_context(name_server(DOMAIN))
        ca = str(settings.paths.state / "tls" / "ca.pem")
        env = {"E2B_API_KEY": server.api_key, "E2B_DOMAIN": f"{DOMAIN}:{port}"}
        yield Target(env | {"SSL_CERT_FILE": ca, "NODE_EXTRA_CA_CERTS": ca}, home, names)


def _settings(home: Path) -> Settings:
    settings = node_settings(home, low=2, high=64)
    return asyncio.run(guest_settings(settings)) if load_settings().sandbox.runtime == "microvm" else settings


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
