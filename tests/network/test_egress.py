"""What reaches whom: real packets between namespaces, and an internet that the test made."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sandyard.config import Settings
from sandyard.errors import NotFound
from sandyard.network import dns
from sandyard.network.policy import CLOSED, OPEN, Policy
from sandyard.network.slots import Slots
from tests.network.conftest import Inside, Internet

pytestmark = pytest.mark.root

Join = Callable[..., Awaitable[Inside]]


@pytest.fixture
def join(slots: Slots) -> Join:
    """Take a slot with a policy, or with a `network` object's fields; be in it."""

    async def _join(policy: Policy | None = None, sandbox_id: str = "one", **network: Any) -> Inside:
        slot = await slots.take(sandbox_id, Policy.of(network) if policy is None else policy)
        return Inside(slot.path)

    return _join


async def test_a_new_slot_reaches_nothing(join: Join, internet: Internet) -> None:
    inside = await join(CLOSED)
    assert await inside.refused(internet.web)
    answer = await inside.ask(dns.query("good.test", 7), internet.names)
    assert answer[:2] == b"\0\x07"
    assert answer[3] & 0xF == dns.Code.REFUSED


async def test_open_means_public_addresses_on_any_port(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    assert await inside.get(internet.web) == f"{internet.web} {internet.web} GET / HTTP/1.1"
    assert (await inside.get(internet.other, port=8080)).startswith(internet.other)
    assert await inside.tls(internet.web, "whatever.test") == f"{internet.web} hello"


async def test_private_and_special_addresses_are_refused_however_open(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=[internet.private, internet.link_local, "169.254.169.254", internet.host])
    with socket.create_connection((internet.private, 80), 5):
        pass  # the host itself reaches it: only the policy is in the way
    for address in (internet.private, internet.link_local, "169.254.169.254", "127.0.0.2", "100.64.0.1"):
        assert await inside.refused(address), address


async def test_the_host_is_refused_by_every_address_of_its_own(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        for address in (internet.host, "10.200.0.1"):
            with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
                await inside.get(address, port=port)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


async def test_one_sandbox_does_not_reach_another(join: Join) -> None:
    first, second = await join(OPEN, "one"), await join(OPEN, "two")
    server = await first.run(lambda: socket.create_server(("0.0.0.0", 8000)))
    with server:
        own = await first.connect("10.200.0.2", 8000)
        own.close()
        assert await second.refused("10.200.0.2", 8000)


async def test_denied_addresses(join: Join, internet: Internet) -> None:
    inside = await join(denyOut=[internet.web])
    assert await inside.refused(internet.web)
    assert await inside.get(internet.other)


async def test_allowed_goes_before_denied(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=[f"{internet.web}/32"], denyOut=["0.0.0.0/0"])
    assert await inside.get(internet.web)
    assert await inside.refused(internet.other)


async def test_no_internet_access_is_deny_all(join: Join, internet: Internet) -> None:
    inside = await join(allowInternetAccess=False, allowOut=[internet.other])
    assert await inside.refused(internet.web)
    assert await inside.get(internet.other)


async def test_a_domain_by_host_header_and_by_sni(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=["good.test"], denyOut=["0.0.0.0/0"])
    assert (await inside.get(internet.web, "good.test")).startswith(f"{internet.web} good.test")
    assert await inside.get(internet.web, "GOOD.test:80")
    assert await inside.tls(internet.web, "good.test")
    assert await inside.refused(internet.web, host="other.test")
    assert await inside.refused(internet.web, host="www.good.test")
    with pytest.raises(OSError, match=r"."):
        await inside.tls(internet.web, "other.test")


async def test_the_name_decides_where_a_connection_goes(join: Join, internet: Internet) -> None:
    """A sandbox that connects elsewhere under an allowed name gets to that name's own address."""
    inside = await join(allowOut=["good.test"], denyOut=["0.0.0.0/0"])
    assert (await inside.get(internet.other, "good.test")).startswith(internet.web)


async def test_a_wildcard_is_what_lies_below(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=["*.good.test"], denyOut=["0.0.0.0/0"])
    assert await inside.get(internet.web, "www.good.test")
    assert await inside.refused(internet.web, host="good.test")
    assert await inside.refused(internet.web, host="nogood.test")


async def test_what_names_no_host_is_not_let_through_by_name(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=["good.test"], denyOut=["0.0.0.0/0"])
    client = await inside.connect(internet.web, 7)
    with client:
        client.sendall(b"SSH-2.0-client\r\n")
        with pytest.raises(ConnectionResetError):
            client.recv(100)


@pytest.mark.parametrize("name", ["inner.test", "metadata.test", "home.test", "self.test"])
async def test_an_allowed_name_with_an_inner_address_is_refused(join: Join, internet: Internet, name: str) -> None:
    inside = await join(allowOut=["*"], denyOut=["0.0.0.0/0"])
    assert await inside.refused(internet.web, host=name)


async def test_a_name_that_changes_its_address_gains_nothing(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=["rebinding.test"], denyOut=["0.0.0.0/0"])
    outcomes = [await inside.refused(internet.web, host="rebinding.test") for _ in range(4)]
    assert sorted(outcomes) == [False, False, True, True]


async def test_names_are_resolved_by_the_node_whatever_server_is_asked(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    for server in (internet.names, "10.200.0.1", "8.8.8.8"):
        answer = await inside.ask(dns.query("good.test", 3), server)
        assert [str(address) for address in dns.addresses(answer)] == [internet.web]


async def test_a_closed_sandbox_asks_for_its_own_names_only(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=["good.test", internet.other], denyOut=["0.0.0.0/0"])
    assert dns.addresses(await inside.ask(dns.query("good.test", 3), internet.names))
    refusal = await inside.ask(dns.query("secret-data.other.test", 3), internet.names)
    assert refusal[3] & 0xF == dns.Code.REFUSED


async def test_answers_tell_nothing_of_the_inner_network(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    answer = await inside.ask(dns.query("inner.test", 3), internet.names)
    assert dns.addresses(answer) == []
    assert (await inside.ask(dns.query("missing.test", 3), internet.names))[3] & 0xF == dns.Code.NO_NAME


async def test_there_is_no_ipv6_address_to_be_had(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    query = bytearray(dns.query("good.test", 3))
    query[-3] = dns.Kind.AAAA
    answer = await inside.ask(bytes(query), internet.names)
    assert (answer[3] & 0xF, answer[6:8]) == (dns.Code.OK, b"\0\0")

    def connect() -> None:
        with socket.socket(socket.AF_INET6) as client:
            client.connect(("2606:4700::1111", 80))

    with pytest.raises(OSError, match="unreachable"):
        await inside.run(connect)


async def test_dns_by_tcp(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    message = dns.query("good.test", 9)
    client = await inside.connect(internet.names, 53)
    with client:
        client.sendall(len(message).to_bytes(2) + message)
        answer = await asyncio.to_thread(client.recv, 4096)
    assert [str(address) for address in dns.addresses(answer[2:])] == [internet.web]


async def echo(inside: Inside, address: str, data: bytes = b"x", port: int = 7) -> bytes:
    def exchange() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(3)
            client.connect((address, port))
            client.send(data)
            return client.recv(65535)

    return await inside.run(exchange)


async def test_datagrams_leave_only_to_addresses_that_are_named(join: Join, slots: Slots, internet: Internet) -> None:
    inside = await join(OPEN)
    with pytest.raises(PermissionError):
        await echo(inside, internet.web)
    await slots.replace("one", Policy.of({"allowOut": [internet.web, internet.private]}))
    assert await echo(inside, internet.web) == b"x"
    for address in (internet.other, internet.private):
        with pytest.raises(PermissionError):
            await echo(inside, address)
    await slots.replace("one", OPEN)
    with pytest.raises(PermissionError):
        await echo(inside, internet.web)


async def test_a_flow_of_datagrams_goes_both_ways(join: Join, internet: Internet) -> None:
    inside = await join(allowOut=[internet.web], denyOut=["0.0.0.0/0"])

    def talk() -> list[bytes]:
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as two,
        ):
            heard = []
            for client in (one, two):
                client.settimeout(3)
            for at in range(20):
                for client, mark in ((one, b"one"), (two, b"two")):
                    client.sendto(mark + bytes([at]), (internet.web, 7))
                    data, sender = client.recvfrom(100)
                    assert sender == (internet.web, 7)
                    heard.append(data)
            return heard

    assert await inside.run(talk) == [mark + bytes([at]) for at in range(20) for mark in (b"one", b"two")]
    assert await echo(inside, internet.web, b"y" * 1200) == b"y" * 1200


async def test_a_flow_that_is_no_longer_allowed_is_cut(join: Join, slots: Slots, internet: Internet) -> None:
    inside = await join(allowOut=[internet.web])
    client = await inside.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with client:
        client.settimeout(0.5)
        client.connect((internet.web, 7))
        client.send(b"x")
        assert await asyncio.to_thread(client.recv, 10) == b"x"
        await slots.replace("one", CLOSED)

        def go_on() -> None:
            for _ in range(3):
                client.send(b"x")
                client.recv(10)

        with pytest.raises((PermissionError, TimeoutError)):
            await asyncio.to_thread(go_on)


async def test_a_policy_that_changes_cuts_what_it_no_longer_allows(
    join: Join, slots: Slots, internet: Internet
) -> None:
    inside = await join(OPEN)
    denied, kept = await inside.connect(internet.web, 7), await inside.connect(internet.other, 7)
    with denied, kept:
        for client in (denied, kept):
            client.sendall(b"one")
            assert await asyncio.to_thread(client.recv, 10) == b"one"
        await slots.replace("one", Policy.of({"denyOut": [internet.web]}))
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(denied.recv, 10)
        kept.sendall(b"two")
        assert await asyncio.to_thread(kept.recv, 10) == b"two"
        assert await inside.refused(internet.web)
    await slots.replace("one", OPEN)
    assert await inside.get(internet.web)


async def test_a_name_that_is_no_longer_allowed_is_cut(join: Join, slots: Slots, internet: Internet) -> None:
    inside = await join(allowOut=["good.test"], denyOut=["0.0.0.0/0"])
    client = await inside.connect(internet.web, 80)
    with client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
        assert await asyncio.to_thread(client.recv, 500)
        await slots.replace("one", Policy.of({"allowOut": ["other.test"], "denyOut": ["0.0.0.0/0"]}))
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(client.recv, 10)


async def test_both_directions_end_by_themselves(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    sent = bytes(range(256)) * 4096
    client = await inside.connect(internet.web, 7)

    def exchange() -> bytes:
        with client:
            client.settimeout(20)
            received = bytearray()
            client.setblocking(True)
            for at in range(0, len(sent), 65536):
                client.sendall(sent[at : at + 65536])
                while len(received) < at + 65536:
                    received += client.recv(1 << 20)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(10) == b""
            return bytes(received)

    assert await asyncio.to_thread(exchange) == sent


async def test_the_listeners_themselves_are_no_way_out(join: Join, internet: Internet) -> None:
    inside = await join(OPEN)
    ports = await inside.run(_listening)
    assert ports
    for port in ports:
        with pytest.raises(OSError, match=r"timed out|reset|ended"):
            await inside.get("127.0.0.1", port=port)


def _listening() -> list[int]:
    with open("/proc/thread-self/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"]


async def test_too_many_connections_wait(settings: Settings, internet: Internet) -> None:
    few = settings.model_copy(update={"network": settings.network.model_copy(update={"max_connections": 2})})
    slots = Slots(few)
    try:
        inside = Inside((await slots.take("one", OPEN)).path)
        first, second = await inside.connect(internet.web, 7), await inside.connect(internet.web, 7)
        third = await inside.connect(internet.web, 7)
        with first, second, third:
            third.settimeout(0.3)
            third.sendall(b"x")
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(third.recv, 1)
            first.close()
            third.settimeout(5)
            assert await asyncio.to_thread(third.recv, 1) == b"x"
        assert slots.counts()["slots"] == 1
    finally:
        await slots.drop("one")
        await slots.stop()


def through(internet: Internet, **proxy: str) -> dict[str, Any]:
    return {"egressProxy": {"address": f"{internet.other}:1080", "username": "me", "password": "secret"} | proxy}


async def test_what_is_allowed_goes_through_the_proxy_of_the_policy(join: Join, internet: Internet) -> None:
    rules = {"denyOut": ["0.0.0.0/0"], "allowOut": ["good.test", "11.0.0.1"]}
    inside = await join(**rules, **through(internet))
    assert await inside.get(internet.web, "good.test") == "sent to good.test 80"
    assert await inside.get("11.0.0.1", port=8080) == "sent to 11.0.0.1 8080"
    assert await inside.refused(internet.web)
    assert await inside.refused(internet.private)
    with pytest.raises(PermissionError):
        await echo(inside, "11.0.0.1")


async def test_a_proxy_by_name_and_one_that_is_never_allowed(join: Join, slots: Slots, internet: Internet) -> None:
    inside = await join(**through(internet, address="other.test:1080"))
    assert await inside.get(internet.web) == f"sent to {internet.web} 80"
    for address in (f"{internet.private}:1080", "inner.test:1080", "missing.test:1080", f"{internet.web}:1"):
        await slots.replace("one", Policy.of(through(internet, address=address)))
        assert await inside.refused(internet.web), address


async def test_a_proxy_that_refuses_the_login(join: Join, internet: Internet) -> None:
    inside = await join(**through(internet, password="wrong"))
    assert await inside.refused(internet.web)


async def test_another_way_cuts_what_went_the_old_one(join: Join, slots: Slots, internet: Internet) -> None:
    inside = await join(OPEN)
    with await inside.connect(internet.web, 7) as client:
        client.sendall(b"x")
        assert await asyncio.to_thread(client.recv, 1) == b"x"
        await slots.replace("one", Policy.of(through(internet)))
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(client.recv, 1)


async def test_all_sandboxes_together_leave_the_server_descriptors(
    join: Join, slots: Slots, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await join(OPEN, "one"), await join(OPEN, "two")
    monkeypatch.setattr(slots._budget, "left", 2)
    with await first.connect(internet.web, 7) as one, await first.connect(internet.web, 7):
        one.sendall(b"x")
        assert await asyncio.to_thread(one.recv, 1) == b"x"
        assert await second.refused(internet.web)
        assert slots.counts()["refused"] == 1
    await slots.drop("one")
    assert await second.get(internet.web)


async def test_unknown_sandboxes_have_no_policy(slots: Slots) -> None:
    with pytest.raises(NotFound, match="nobody"):
        await slots.replace("nobody", OPEN)
