"""The DNS codec and the resolver, against messages that were cut, bent and forged."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from sandyard.network import dns, resolver
from sandyard.network.resolver import Resolver, Unresolved, host_resolvers


def answer(query: bytes, *addresses: str) -> bytes:
    head = dns.reply(query, dns.question(query), dns.Code.OK)
    records = [b"\xc0\x0c\0\1\0\1\0\0\0\5\0\4" + IPv4Address(address).packed for address in addresses]
    return head[:6] + len(records).to_bytes(2) + head[8:] + b"".join(records)


def test_a_query_and_its_answer() -> None:
    query = dns.query("www.Example.com", 0x1234)
    asked = dns.question(query)
    assert (asked.name, asked.kind) == ("www.example.com", dns.Kind.A)
    reply = answer(query, "1.2.3.4", "5.6.7.8")
    assert dns.answers(reply, asked, 0x1234)
    assert not dns.answers(reply, asked, 0x1235)
    assert not dns.answers(query, asked, 0x1234)
    assert not dns.answers(answer(dns.query("evil.test", 0x1234), "6.6.6.6"), asked, 0x1234)
    assert dns.addresses(reply) == [IPv4Address("1.2.3.4"), IPv4Address("5.6.7.8")]


@pytest.mark.parametrize("name", ["", "a..b", "x" * 64, "ü.test"])
def test_what_cannot_be_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        dns.query(name, 1)


def test_a_name_that_points_at_itself() -> None:
    query = dns.query("a.test", 1)
    with pytest.raises(ValueError, match="broken"):
        dns.question(query[:12] + b"\xc0\x0c" + query[-4:])


@given(st.binary(max_size=200), st.integers(0, 60))
@settings(deadline=None)
def test_broken_messages_are_value_errors(noise: bytes, cut: int) -> None:
    whole = answer(dns.query("example.com", 1), "1.2.3.4")
    for message in (noise, whole[:cut] + noise, whole[:12] + noise):
        for read in (dns.question, dns.addresses):
            try:
                read(message)
            except ValueError:
                continue


def test_the_hosts_resolvers(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text(
        "# nameserver 9.9.9.9\nsearch x\nnameserver 1.1.1.1\nnameserver fe80::1%eth0\nnameserver nonsense\n"
    )
    assert host_resolvers(path) == ["1.1.1.1", "fe80::1%eth0"]
    assert host_resolvers(tmp_path / "missing") == ["127.0.0.1"]


class Server(asyncio.DatagramProtocol):
    """Sends forged answers before the true one."""

    def __init__(self) -> None:
        self.silent = False
        self.seen = 0

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        self.seen += 1
        if not self.silent:
            forged = bytes([data[0] ^ 1]) + data[1:]
            for message in (b"noise", answer(forged, "6.6.6.6"), answer(data, "1.2.3.4")):
                self.transport.sendto(message, addr)


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(Server, ("127.0.0.1", 0))
    monkeypatch.setattr(resolver, "PORT", transport.get_extra_info("sockname")[1])
    yield protocol
    transport.close()
    await asyncio.sleep(0)


async def test_forged_answers_are_not_taken(server: Server) -> None:
    assert await Resolver(["127.0.0.1"]).addresses("example.com") == [IPv4Address("1.2.3.4")]


async def test_the_next_resolver_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "TRY_SECONDS", 0.2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute:
        mute.bind(("127.0.0.2", resolver.PORT))
        assert await Resolver(["127.0.0.2", "127.0.0.1"]).addresses("example.com")


async def test_nobody_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "TRY_SECONDS", 0.05)
    server.silent = True
    with pytest.raises(Unresolved, match=r"example\.com"):
        await Resolver(["127.0.0.1"]).addresses("example.com")
    assert server.seen == resolver.ROUNDS


async def test_the_servers_of_a_policy_go_before_the_nodes(server: Server) -> None:
    assert await Resolver(["192.0.2.1"]).addresses("example.com", ["127.0.0.1"])
