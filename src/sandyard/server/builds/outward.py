"""Connections to registries that a request names: to public addresses only, as those of sandboxes are.

Whoever may build could else make this server ask its own network, or the host itself, on their behalf.
Registries that the operator's settings name are the operator's choice, and reached as usual.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

import httpx

from sandyard.config import ImageSettings, Settings
from sandyard.network.outside import Outside
from sandyard.network.policy import never_allowed

REMEDY = "name the registry in images.plain_http, images.registries or images.allowed"


def trusted(images: ImageSettings) -> Collection[str]:
    """Registries, as `host[:port]`, that the settings name to pull from."""
    named = [
        *images.registries,
        *images.plain_http,
        *images.allowed,
        *(m for ms in images.mirrors.values() for m in ms),
    ]
    return {name.partition("/")[0] for name in named}


class PublicOnly(httpx.AsyncBaseTransport):
    """HTTP to hosts whose address is public, redirects included. The address that was judged is the one that
    is connected to, so no second answer of a name server counts."""

    def __init__(self, settings: Settings) -> None:
        self._outside = Outside(never_allowed(settings.network))
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.ConnectError` for an address that is not public."""
        host = request.url.host
        address = await self._address(host, request.url.port or {"https": 443}.get(request.url.scheme, 80))
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=address),
            headers=request.headers,  # with the Host that was asked for
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _address(self, host: str, port: int) -> str:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx.ConnectError(f"{host}: {error.strerror or error}") from error
        addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
        for address in addresses:
            if self._public(ip_address(address)):
                return address
        raise httpx.ConnectError(f"{host} has no address that builds may reach; {REMEDY}")

    def _public(self, address: IPv4Address | IPv6Address) -> bool:
        if isinstance(address, IPv6Address):
            inner = address.ipv4_mapped or address.sixtofour
            return self._public(inner) if inner is not None else address.is_global
        return not self._outside.forbidden(address)
