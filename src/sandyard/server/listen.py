"""Addresses the server listens on: which are refused, how they are opened, whether they answer."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandyard.config import Settings
from sandyard.connection import is_loopback
from sandyard.errors import ConfigError, HostError

if TYPE_CHECKING:
    from sandyard.server.tls import TlsIdentity

HTTPS_PORT = 443
SELF_CHECK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Listener:
    """Where the server listens, and with what certificate, if with any."""

    socket: socket.socket
    tls: TlsIdentity | None = None


def check_address(settings: Settings) -> None:
    """Raises `ConfigError` for a plain HTTP address that others can reach, unless that was asked for."""
    host = settings.server.host
    if settings.server.allow_public or is_loopback(host):
        return
    raise ConfigError(
        f"setting server.host: {host} can be reached from elsewhere, and it serves plain HTTP",
        remedy="listen on 127.0.0.1 and give others server.tls_port with server.tls_host, or set server.allow_public",
    )


def open_socket(settings: Settings) -> socket.socket:
    """Bind and listen. Raises `HostError` with the remedy."""
    return _listen("server.host", settings.server.host, "server.port", settings.server.port)


def open_tls_socket(settings: Settings) -> socket.socket:
    """Like `open_socket`, for the TLS port."""
    server = settings.server
    return _listen("server.tls_host", server.tls_host or server.host, "server.tls_port", server.tls_port or 0)


def _listen(host_key: str, host: str, port_key: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Inherited by connections; without it the second write of a response may wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"see who has it with 'ss -ltnp sport = :{port}', or set another {port_key}"
            raise HostError(f"port {port} on {host} is in use", remedy=remedy) from error
        raise HostError(f"cannot listen on {host} port {port}: {error.strerror}", remedy=f"check {host_key}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def with_public_port(settings: Settings, listener: socket.socket) -> Settings:
    """`server.domain` as clients must write it: with the TLS port, unless that is 443 or a port is given."""
    domain, port = settings.server.domain, listener.getsockname()[1]
    if domain is None or ":" in domain or port == HTTPS_PORT:
        return settings
    server = settings.server.model_copy(update={"domain": f"{domain}:{port}"})
    return settings.model_copy(update={"server": server})


async def answers(where: Listener) -> None:
    """Return when the server answers a request of its own. Raises `HostError`."""
    host, port = where.socket.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with asyncio.timeout(SELF_CHECK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, **_client_tls(where.tls))
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
    except (OSError, TimeoutError) as error:
        raise HostError(f"the server does not answer on {host} port {port}: {error}") from error
    if b" 204 " not in status:
        raise HostError(f"the server answers its own health check with {status!r}")


def _client_tls(tls: TlsIdentity | None) -> dict[str, Any]:
    if tls is None:
        return {}
    context = ssl.create_default_context(cafile=tls.ca)
    if tls.ca is None:  # given, and signed by whom only its clients know
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return {"ssl": context, "server_hostname": f"api.{tls.domain}" if tls.domain else "localhost"}
