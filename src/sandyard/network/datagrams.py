"""UDP of a sandbox, to the addresses that its policy names: each flow is a pair of sockets.

The first datagram of a flow is diverted (TPROXY) to a listener in the namespace. For the flow there
is a socket then that has the outer address, in the namespace, and one that the host connected to it;
what comes later goes straight to the former. A flow ends when nothing came for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import structlog

from sandyard.errors import HostError
from sandyard.network import namespace
from sandyard.network.budget import Budget
from sandyard.network.namespace import Plan
from sandyard.network.outside import Outside
from sandyard.network.policy import CLOSED, Policy
from sandyard.network.voice import Voice

log = structlog.get_logger("sandyard.network")

IDLE_SECONDS = 60.0
MAX_FLOWS = 64
MAX_WAITING = 16
_SIZE = 65535
_IP_TRANSPARENT = 19
_IP_RECVORIGDSTADDR = 20

_Key = tuple[str, int, str, int]  # the sandbox's address and port, the outer address and port


@dataclass(slots=True, eq=False)
class _Flow:
    waiting: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))
    last: float = field(default_factory=time.monotonic)


class Datagrams:
    """Used from one event loop. Owns its sockets; the descriptor of the namespace is its owner's."""

    def __init__(self, voice: Voice, descriptor: int, plan: Plan, outside: Outside, budget: Budget) -> None:
        self.policy: Policy = CLOSED
        self._voice = voice
        self._descriptor = descriptor
        self._plan = plan
        self._outside = outside
        self._budget = budget
        self._listener: socket.socket | None = None
        self._flows: dict[_Key, tuple[_Flow, asyncio.Task[None]]] = {}

    async def replace(self, policy: Policy) -> None:
        """From here on nothing is passed on that `policy` does not allow. A host that cannot divert
        datagrams keeps them denied, and says so in the log."""
        before, self.policy = self.policy, policy
        for key, (_, task) in self._flows.items():
            if not policy.allows_datagrams(IPv4Address(key[2])):
                task.cancel()
        if before.datagrams == policy.datagrams:
            return
        try:
            await self._divert(policy)
        except HostError as error:
            log.error("datagrams stay denied", error=str(error))

    async def close(self) -> None:
        """Idempotent."""
        self.policy = CLOSED
        tasks = [task for _, task in self._flows.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    async def _divert(self, policy: Policy) -> None:
        if self._listener is None:
            listener = await namespace.inside(self._descriptor, _listen)
            self._listener = listener
            asyncio.get_running_loop().add_reader(listener, self._receive, listener)
        port = self._listener.getsockname()[1]
        plan = self._plan
        await namespace.inside(self._descriptor, lambda: namespace.divert(plan, port, policy.datagrams))

    def _receive(self, listener: socket.socket) -> None:
        for _ in range(64):  # then others have their turn
            try:
                data, extra, _, source = listener.recvmsg(_SIZE, 64)
            except OSError:  # nothing more, or what an earlier one met on its way
                return
            target = _original(extra)
            if target is not None:
                self._take((*source, *target), data)

    def _take(self, key: _Key, data: bytes) -> None:
        known = self._flows.get(key)
        if known is not None:
            known[0].waiting.append(data)
            return
        address = IPv4Address(key[2])
        if not self.policy.allows_datagrams(address) or self._outside.forbidden(address):
            self._voice.say("datagram refused", address=key[2], port=key[3])
        elif len(self._flows) >= MAX_FLOWS or not self._budget.take():
            self._voice.say("datagram refused", address=key[2], port=key[3], reason="too many flows")
        else:
            flow = _Flow()
            flow.waiting.append(data)
            task = asyncio.create_task(self._serve(key, flow))
            self._flows[key] = flow, task
            task.add_done_callback(lambda _: self._end(key))

    def _end(self, key: _Key) -> None:
        del self._flows[key]
        self._budget.give()

    async def _serve(self, key: _Key, flow: _Flow) -> None:
        client, target = key[:2], key[2:]
        try:
            inner = await namespace.inside(self._descriptor, lambda: _connected(target, client))
        except OSError as error:
            self._voice.say("datagram refused", address=key[2], port=key[3], reason=str(error))
            return
        with inner, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outer, contextlib.suppress(OSError):
            outer.setblocking(False)
            outer.connect(target)
            while flow.waiting:
                await asyncio.get_running_loop().sock_sendall(outer, flow.waiting.popleft())
            await _exchange(flow, inner, outer)


async def _exchange(flow: _Flow, inner: socket.socket, outer: socket.socket) -> None:
    """Until nothing came for a while, or one side is refused. Raises `OSError`."""
    tasks = [asyncio.create_task(_pump(flow, *pair)) for pair in ((inner, outer), (outer, inner))]
    try:
        while (left := flow.last + IDLE_SECONDS - time.monotonic()) > 0:
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(flow: _Flow, source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        data = await loop.sock_recv(source, _SIZE)
        flow.last = time.monotonic()
        await loop.sock_sendall(sink, data)


def _listen() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
    made.setsockopt(socket.SOL_IP, _IP_RECVORIGDSTADDR, 1)
    made.bind(("127.0.0.1", 0))
    return made


def _connected(own: tuple[str, int], peer: tuple[str, int]) -> socket.socket:
    """A socket that stands for an outer address within the namespace."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one for each flow to that address
        made.bind(own)
        made.connect(peer)
    except BaseException:
        made.close()
        raise
    return made


def _original(extra: list[tuple[int, int, bytes]]) -> tuple[str, int] | None:
    for level, kind, data in extra:
        if (level, kind) == (socket.SOL_IP, _IP_RECVORIGDSTADDR):
            _, port, host = struct.unpack("!HH4s", data[:8])
            return socket.inet_ntoa(host), port
    return None
