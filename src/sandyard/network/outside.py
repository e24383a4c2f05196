"""Connecting from the host on a sandbox's behalf: what is never allowed is refused here, last of all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from sandyard.network.policy import Policy

CONNECT_SECONDS = 20.0


class Refused(Exception):
    """The connection is not to be made, or could not be; the message says why."""


@dataclass(frozen=True, slots=True)
class Outside:
    """`never`: ranges that no policy opens."""

    never: tuple[IPv4Network, ...]

    def forbidden(self, address: IPv4Address) -> bool:
        """Whether the address is in one of those ranges, or is the host's own, whatever its range."""
        return any(address in block for block in self.never) or is_local(address)

    def resolvers(self, policy: Policy) -> list[str]:
        """The DNS servers a policy asks for; [] where it leaves them to the node. Raises `Refused`."""
        servers = [str(server) for server in policy.resolvers if not self.forbidden(server)]
        if policy.resolvers and not servers:
            raise Refused("its DNS servers are never allowed")
        return servers

    async def connect(self, addresses: Sequence[IPv4Address], port: int) -> tuple[socket.socket, IPv4Address]:
        """A connection to the first address that takes one. Raises `Refused`."""
        failure = "there is no address"
        for address in addresses:
            if self.forbidden(address):
                failure = f"{address} is never allowed"
                continue
            try:
                return await self._connect(address, port), address
            except (OSError, TimeoutError) as error:
                failure = f"{address} port {port}: {error or 'no answer'}"
        raise Refused(failure)

    async def _connect(self, address: IPv4Address, port: int) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            tune(made)
            async with asyncio.timeout(CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(made, (str(address), port))
        except BaseException:
            made.close()
            raise
        return made


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)


def is_local(address: IPv4Address) -> bool:
    """Whether the address is this host's own."""
    # The kernel's own word: only an address of this host can be bound.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
        return True
