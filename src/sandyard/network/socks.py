"""A connection through the SOCKS5 proxy of a policy (RFC 1928, RFC 1929), asked for after the rules allowed it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address

from sandyard.network.outside import Outside, Refused
from sandyard.network.policy import Proxy
from sandyard.network.resolver import Resolver, Unresolved, exactly

SECONDS = 20.0

_VERSION, _LOGIN_VERSION = 5, 1
_NO_LOGIN, _LOGIN = 0, 2
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_REASONS = {2: "not allowed by its rules", 3: "network unreachable", 4: "host unreachable", 5: "refused", 6: "expired"}


@dataclass(frozen=True, slots=True)
class Socks:
    outside: Outside
    resolver: Resolver

    async def connect(self, proxy: Proxy, target: IPv4Address | str, port: int) -> socket.socket:
        """A name is resolved by the proxy. Raises `Refused`."""
        where = f"proxy {proxy.host}:{proxy.port}"
        connection, _ = await self.outside.connect(await self._addresses(proxy), proxy.port)
        try:
            async with asyncio.timeout(SECONDS):
                await _login(connection, proxy)
                await _ask(connection, target, port)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            connection.close()
            raise Refused(f"{where}: {error or 'no answer'}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _addresses(self, proxy: Proxy) -> list[IPv4Address]:
        try:
            return [IPv4Address(proxy.host)]
        except AddressValueError:
            pass
        try:
            return await self.resolver.addresses(proxy.host)
        except Unresolved as error:
            raise Refused(str(error)) from error


async def _login(connection: socket.socket, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    methods = bytes([_NO_LOGIN, _LOGIN] if proxy.username else [_NO_LOGIN])
    await loop.sock_sendall(connection, bytes([_VERSION, len(methods)]) + methods)
    version, method = await exactly(connection, 2)
    if version != _VERSION or method not in methods:
        raise ValueError("it wants another login" if version == _VERSION else "it is no SOCKS5 proxy")
    if method == _LOGIN:
        user, password = proxy.username.encode(), proxy.password.encode()
        await loop.sock_sendall(
            connection, bytes([_LOGIN_VERSION, len(user)]) + user + bytes([len(password)]) + password
        )
        _, status = await exactly(connection, 2)
        if status != 0:
            raise ValueError("it refuses the login")


async def _ask(connection: socket.socket, target: IPv4Address | str, port: int) -> None:
    if isinstance(target, str):
        name = target.encode("ascii")
        where = bytes([_NAME, len(name)]) + name
    else:
        where = bytes([_IPV4]) + target.packed
    request = bytes([_VERSION, _CONNECT, 0]) + where + port.to_bytes(2)
    await asyncio.get_running_loop().sock_sendall(connection, request)
    _, status, _, kind = await exactly(connection, 4)
    if status != 0:
        raise ValueError(_REASONS.get(status, f"refused with {status}"))
    size = {_IPV4: 4, _IPV6: 16}.get(kind)
    if size is None:
        size = (await exactly(connection, 1))[0]
    await exactly(connection, size + 2)
