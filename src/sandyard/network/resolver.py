"""Asking the node's resolvers, from the host: for the proxy's own use and for the sandboxes' queries."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import structlog

from sandyard.network import dns

log = structlog.get_logger("sandyard.network")

PORT = 53
TRY_SECONDS = 2.5
ROUNDS = 2


class Unresolved(Exception):
    """No resolver gave a usable answer."""


def host_resolvers(path: Path = Path("/etc/resolv.conf")) -> list[str]:
    """The `nameserver` lines of the host; the local one where it has none, as resolv.conf(5) says."""
    try:
        lines = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        lines = []
    servers = [line[1] for line in lines if len(line) > 1 and line[0] == "nameserver"]
    return [server for server in servers if _is_address(server)] or ["127.0.0.1"]


class Resolver:
    """Stateless: each query has its own socket, so its own random port, and a random identity."""

    def __init__(self, servers: Sequence[str] | None = None) -> None:
        self._servers = servers

    async def exchange(self, message: bytes, servers: Sequence[str] = (), *, stream: bool = False) -> bytes:
        """The answer to a query as it came, asked of `servers`, else of the node's. Raises `Unresolved`."""
        asked = dns.question(message)
        for server in [*(servers or self._servers or host_resolvers())] * ROUNDS:
            identity = secrets.randbits(16)
            sent = identity.to_bytes(2) + message[2:]
            try:
                async with asyncio.timeout(TRY_SECONDS):
                    answer = await (_by_stream if stream else _by_datagram)(server, sent, asked, identity)
            except (OSError, TimeoutError, EOFError) as error:
                log.debug("resolver failed", server=server, name=asked.name, error=str(error) or "no answer")
                continue
            return message[:2] + answer[2:]
        raise Unresolved(f"no resolver answers for {asked.name}")

    async def addresses(self, name: str, servers: Sequence[str] = ()) -> list[IPv4Address]:
        """Raises `Unresolved`; no address at all is an empty list."""
        try:
            message = dns.query(name, 0)
            answer = await self.exchange(message, servers)
            if dns.truncated(answer):
                answer = await self.exchange(message, servers, stream=True)
            return dns.addresses(answer)
        except ValueError as error:
            raise Unresolved(f"{name}: {error}") from error


async def _by_datagram(server: str, message: bytes, asked: dns.Question, identity: int) -> bytes:
    loop = asyncio.get_running_loop()
    with _socket(server, socket.SOCK_DGRAM) as peer:
        await loop.sock_connect(peer, (server, PORT))
        await loop.sock_sendall(peer, message)
        while True:
            answer = await loop.sock_recv(peer, dns.MAX_MESSAGE)
            if dns.answers(answer, asked, identity):
                return answer


async def _by_stream(server: str, message: bytes, asked: dns.Question, identity: int) -> bytes:
    loop = asyncio.get_running_loop()
    with _socket(server, socket.SOCK_STREAM) as peer:
        await loop.sock_connect(peer, (server, PORT))
        await loop.sock_sendall(peer, len(message).to_bytes(2) + message)
        answer = await read_framed(peer)
    if not dns.answers(answer, asked, identity):
        raise EOFError("the answer is to another question")
    return answer


async def read_framed(peer: socket.socket) -> bytes:
    """One message with its length before it. Raises `EOFError` where the peer ends before that."""
    size = int.from_bytes(await exactly(peer, 2))
    return await exactly(peer, size)


async def exactly(peer: socket.socket, count: int) -> bytes:
    """Raises `EOFError` where the peer ends before that."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(peer, count - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return data


def _socket(server: str, kind: socket.SocketKind) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, kind)
    made.setblocking(False)
    return made


def _is_address(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
