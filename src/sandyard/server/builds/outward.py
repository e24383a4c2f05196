"""Connections to registries that a request names: to public addresses only, as those of sandboxes are.

Whoever may build could else make this server ask its own network, or the host itself, on their behalf.
Registries that the operator's settings name are the operator's choice, and reached as usual.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Sequence
from ipaddress import IPv4Address

import httpx

from sandyard.config import ImageSettings, Settings
from sandyard.network.outside import Outside
from sandyard.network.policy import never_allowed

MOST_ADDRESSES = 4
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
    is connected to, so no second answer of a name server counts. IPv4 only, as in sandboxes, and without a proxy
    of the environment, which would connect to anything."""

    def __init__(self, settings: Settings) -> None:
        self._outside = Outside(never_allowed(settings.network))
        # A kept connection is known by its address, not by the name that its certificate was checked for.
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.ConnectError` where no address is public, with the same words as where there is none."""
        host = request.url.host
        failure: httpx.TransportError = httpx.ConnectError(f"{host} has no address that builds may reach; {REMEDY}")
        for address in await self._addresses(host):
            try:
                return await self._inner.handle_async_request(_pinned(request, address))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _addresses(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # no such name here, or what cannot be one
            return []
        addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
        return [address for address in addresses if self._public(IPv4Address(address))][:MOST_ADDRESSES]

    def _public(self, address: IPv4Address) -> bool:
        return not self._outside.forbidden(address)


def _pinned(request: httpx.Request, address: str) -> httpx.Request:
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,  # with the Host that was asked for
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )
