"""DNS of a sandbox: every query ends here, whatever server it was sent to.

Names that the policy does not let it ask for are refused. Answers with an address that is never
allowed are withheld: they would tell about the inside of the host's network. There is no IPv6 inside,
so no AAAA either, and no HTTPS records, whose keys could hide the name a client asks for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from sandyard.network import dns
from sandyard.network.dns import Code, Kind
from sandyard.network.egress import accept_each
from sandyard.network.outside import Outside, Refused
from sandyard.network.policy import CLOSED, Policy
from sandyard.network.resolver import Resolver, Unresolved, read_framed
from sandyard.network.voice import Voice

AT_ONCE = 64
STREAM_SECONDS = 15.0
DATAGRAM = 4096
_WITHHELD = {Kind.AAAA, Kind.SVCB, Kind.HTTPS}


class Forwarder:
    """Used from one event loop."""

    def __init__(
        self, voice: Voice, datagrams: socket.socket, streams: socket.socket, outside: Outside, resolver: Resolver
    ) -> None:
        self._voice = voice
        self.policy: Policy = CLOSED
        self._datagrams = datagrams
        self._outside = outside
        self._resolver = resolver
        self._places = asyncio.Semaphore(AT_ONCE)
        self._queries: set[asyncio.Task[None]] = set()
        self._listening = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(accept_each(streams, self._places, self._begin_stream)),
        ]

    async def close(self) -> None:
        """The sockets stay their owner's to close. Idempotent."""
        self.policy = CLOSED
        tasks = [*self._listening, *self._queries]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def answer(self, message: bytes, *, stream: bool) -> bytes | None:
        """The answer to one query; None to what is none."""
        if not dns.is_query(message):
            return None
        try:
            asked = dns.question(message)
        except ValueError:
            return message[:2] + (0x8000 | Code.FORMAT).to_bytes(2) + bytes(8)
        if not self.policy.may_resolve(asked.name) or asked.kind == Kind.PTR:
            self._voice.say("query refused", name=asked.name, kind=asked.kind)
            return dns.reply(message, asked, Code.NO_NAME if asked.kind == Kind.PTR else Code.REFUSED)
        if asked.kind in _WITHHELD:
            return dns.reply(message, asked, Code.OK)
        try:
            servers = self._outside.resolvers(self.policy)
            answer = await self._resolver.exchange(message, servers, stream=stream)
            inner = [address for address in dns.addresses(answer) if self._outside.forbidden(address)]
        except (Unresolved, Refused, ValueError) as error:
            self._voice.say("query failed", name=asked.name, reason=str(error))
            return dns.reply(message, asked, Code.FAILED)
        if inner:
            self._voice.say("answer withheld", name=asked.name, addresses=[str(one) for one in inner])
            return dns.reply(message, asked, Code.OK)
        return answer

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                message, sender = await loop.sock_recvfrom(self._datagrams, DATAGRAM)
            except OSError as error:  # what an earlier answer met on its way
                self._places.release()
                self._voice.say("query not received", error=str(error))
                continue
            except BaseException:
                self._places.release()
                raise
            self._begin(self._datagram(message, sender))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._queries.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._queries.discard(task)
        self._places.release()

    async def _datagram(self, message: bytes, sender: object) -> None:
        answer = await self.answer(message, stream=False)
        if answer is not None:
            try:
                await asyncio.get_running_loop().sock_sendto(self._datagrams, answer, sender)  # type: ignore[arg-type]
            except OSError as error:
                self._voice.say("answer not sent", error=str(error))

    def _begin_stream(self, client: socket.socket) -> None:
        self._begin(self._stream(client))

    async def _stream(self, client: socket.socket) -> None:
        with client:
            try:
                async with asyncio.timeout(STREAM_SECONDS):
                    while (answer := await self.answer(await read_framed(client), stream=True)) is not None:
                        await asyncio.get_running_loop().sock_sendall(client, len(answer).to_bytes(2) + answer)
            except (OSError, EOFError, TimeoutError):
                return  # it has what it wanted, or will ask again
