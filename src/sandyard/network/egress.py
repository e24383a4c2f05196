"""A sandbox's way out: its TCP connections, taken in its namespace and continued from the host's.

A connection is judged before anything is sent for it, and again whenever the policy changes while
it is open. One that is not to be is reset, as is one whose other end cannot be reached.

By name means: the first bytes name a host (`hello`) that a rule allows; the host is resolved here,
whatever address the sandbox connected to, so that no DNS answer of anybody else's counts. As
everywhere, two names that one server serves cannot be told apart once the connection stands.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address

import structlog

from sandyard.network.budget import Budget
from sandyard.network.hello import LIMIT, Incomplete, requested_host
from sandyard.network.outside import Outside, Refused, tune
from sandyard.network.policy import CLOSED, Policy, Proxy
from sandyard.network.resolver import Resolver, Unresolved
from sandyard.network.socks import Socks
from sandyard.network.voice import Voice

log = structlog.get_logger("sandyard.network")

HELLO_SECONDS = 10.0
CHUNK = 128 * 1024
_SO_ORIGINAL_DST = 80
_SHORT_OF_DESCRIPTORS = 0.1


@dataclass(slots=True, eq=False)
class _Connection:
    address: IPv4Address | None = None
    name: str | None = None  # set where it is allowed by name
    proxy: Proxy | None = None

    def allowed(self, policy: Policy) -> bool:
        if self.address is None:
            return True  # not judged yet: it will be, by the new policy
        if policy.proxy != self.proxy:
            return False
        if policy.allows_address(self.address):
            return True
        return self.name is not None and policy.allows_domain(self.name)


class Egress:
    """Used from one event loop. `policy` changes by `replace` only."""

    def __init__(
        self, voice: Voice, listener: socket.socket, outside: Outside, resolver: Resolver, budget: Budget, limit: int
    ) -> None:
        self.policy = CLOSED
        self.refused = 0
        self._voice = voice
        self._budget = budget
        self._listener = listener
        self._outside = outside
        self._resolver = resolver
        self._places = asyncio.Semaphore(limit)
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._accepting = asyncio.create_task(self._accept())

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def replace(self, policy: Policy) -> None:
        """From here on nothing is allowed that `policy` does not allow; what is open is cut."""
        self.policy = policy
        for connection, task in self._connections.items():
            if not connection.allowed(policy):
                task.cancel()

    async def close(self) -> None:
        """Cut everything. The listener stays its owner's to close. Idempotent."""
        self.policy = CLOSED
        tasks = [self._accepting, *self._connections.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        await accept_each(self._listener, self._places, self._begin)

    def _begin(self, client: socket.socket) -> None:
        if not self._budget.take():
            self.refused += 1
            self._voice.say("egress refused", reason="this server has no descriptors to spare")
            reset_on_close(client, True)
            client.close()
            self._places.release()
            return
        connection = _Connection()
        task = self._connections[connection] = asyncio.create_task(self._serve(client, connection))
        task.add_done_callback(lambda _: self._end(client, connection))

    def _end(self, client: socket.socket, connection: _Connection) -> None:
        client.close()
        del self._connections[connection]
        self._budget.give()
        self._places.release()

    async def _serve(self, client: socket.socket, connection: _Connection) -> None:
        reset_on_close(client, True)
        try:
            server, early = await self._open(client, connection)
        except Refused as refusal:
            self.refused += 1
            self._voice.say("egress refused", name=connection.name, reason=str(refusal))
            return
        except OSError:
            return  # the client left
        try:
            tune(client)
            await relay(client, server, early)
            reset_on_close(client, False)
        except OSError:
            pass  # one side broke: the other hears it as a reset
        finally:
            server.close()

    async def _open(self, client: socket.socket, connection: _Connection) -> tuple[socket.socket, bytes]:
        """Raises `Refused`."""
        address, port = _destination(client)
        if self._outside.forbidden(address):
            raise Refused(f"{address} is never allowed")
        if self.policy.allows_address(address):
            connection.address, connection.proxy = address, self.policy.proxy
            return await self._connect(address, port), b""
        if not self.policy.domains:
            raise Refused(f"{address} port {port} is denied")
        early, name = await _hello(client)
        if name is None or not self.policy.allows_domain(name):
            raise Refused(f"{address} port {port} is denied, and host {name or '(not named)'} is not allowed")
        connection.address, connection.name, connection.proxy = address, name, self.policy.proxy
        return await self._connect(name, port), early

    async def _connect(self, target: IPv4Address | str, port: int) -> socket.socket:
        """Raises `Refused`."""
        proxy = self.policy.proxy
        if proxy is not None:
            return await Socks(self._outside, self._resolver).connect(proxy, target, port)
        try:
            servers = self._outside.resolvers(self.policy)
            addresses = [target] if not isinstance(target, str) else await self._resolver.addresses(target, servers)
        except Unresolved as error:
            raise Refused(str(error)) from error
        return (await self._outside.connect(addresses, port))[0]


async def accept_each(
    listener: socket.socket, places: asyncio.Semaphore, begin: Callable[[socket.socket], None]
) -> None:
    """Accept while there are places; `begin` owns the connection and its place. Ends by cancellation."""
    loop = asyncio.get_running_loop()
    while True:
        await places.acquire()
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:
            places.release()
            log.warning("accept failed", error=str(error))
            await asyncio.sleep(_SHORT_OF_DESCRIPTORS)
            continue
        except BaseException:
            places.release()
            raise
        begin(client)


async def relay(client: socket.socket, server: socket.socket, early: bytes) -> None:
    """Pass bytes both ways until both sides have ended. Raises `OSError` as soon as one breaks."""
    loop = asyncio.get_running_loop()
    if early:
        await loop.sock_sendall(server, early)
    work: list[Awaitable[None]] = [_pump(client, server), _pump(server, client)]
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK):
        await loop.sock_sendall(sink, data)
    with suppress(OSError):  # it is gone altogether: its own direction says so
        sink.shutdown(socket.SHUT_WR)


async def _hello(client: socket.socket) -> tuple[bytes, str | None]:
    loop = asyncio.get_running_loop()
    data = b""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            while len(data) < LIMIT:
                part = await loop.sock_recv(client, CHUNK)
                data += part
                with suppress(Incomplete):
                    return data, requested_host(data)
                if not part:
                    break
    except TimeoutError:
        pass  # who waits for the other side to speak first names no host
    return data, None


def _destination(client: socket.socket) -> tuple[IPv4Address, int]:
    """Where the sandbox meant to connect. Raises `Refused` for a connection that was not redirected."""
    try:
        address = client.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    except OSError as error:
        raise Refused(f"not a redirected connection: {error}") from error
    _, port, host = struct.unpack("!HH4s8x", address)
    return IPv4Address(host), port


def reset_on_close(connection: socket.socket, reset: bool) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
