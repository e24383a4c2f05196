"""The side of a slot that a guest kernel is on, with another namespace in the place of the guest."""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandyard.network import dns, namespace
from sandyard.network.policy import OPEN, Policy
from sandyard.network.slots import Slots
from tests.network.conftest import Inside, Internet, run
from tests.network.test_egress import echo

pytestmark = pytest.mark.root


@pytest_asyncio.fixture
async def guest(slots: Slots) -> AsyncIterator[Inside]:
    """What is behind the tap of slot `one`."""
    slot = await slots.take("one", OPEN)
    name = f"sytap-{secrets.token_hex(3)}"
    run("ip", "netns", "add", name)
    inside = Inside(Path("/run/netns") / name)

    def replace() -> None:
        run("ip", "link", "delete", "eth0")
        run("ip", "link", "add", namespace.TAP, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "address", "add", "10.200.0.1/30", "dev", namespace.TAP)
        run("ip", "link", "set", namespace.TAP, "up")
        Path(f"/proc/sys/net/ipv4/conf/{namespace.TAP}/route_localnet").write_text("1")

    try:
        await Inside(slot.path).run(replace)
        for command in ("address add 10.200.0.2/30 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", name, *command.split())
        run("ip", "-n", name, "route", "add", "default", "via", "10.200.0.1")
        yield inside
    finally:
        run("ip", "netns", "delete", name)


async def test_what_comes_through_the_tap_meets_the_rules(guest: Inside, slots: Slots, internet: Internet) -> None:
    assert await guest.get(internet.web) == f"{internet.web} {internet.web} GET / HTTP/1.1"
    assert await guest.tls(internet.other, "good.test") == f"{internet.other} hello"
    answer = await guest.ask(dns.query("good.test", 9), "10.200.0.1")
    assert [str(address) for address in dns.addresses(answer)] == [internet.web]
    for address in ("169.254.169.254", internet.private, internet.host, "10.200.0.1", "127.0.0.1"):
        assert await guest.refused(address), address
    await slots.replace("one", Policy.of({"allowOut": ["*.good.test"], "denyOut": ["0.0.0.0/0"]}))
    assert await guest.tls(internet.web, "www.good.test") == f"{internet.web} hello"
    assert await guest.refused(internet.web, host="good.test")


async def test_datagrams_through_the_tap(guest: Inside, slots: Slots, internet: Internet) -> None:
    with pytest.raises(OSError, match="No route to host"):
        await echo(guest, internet.web)
    await slots.replace("one", Policy.of({"allowOut": [internet.web, internet.private]}))
    assert await echo(guest, internet.web) == b"x"
    for address in (internet.other, internet.private):
        with pytest.raises(OSError, match="No route to host"):
            await echo(guest, address)


async def test_only_the_address_that_was_given_counts(guest: Inside, internet: Internet) -> None:
    """A guest's root can take any; neither that nor loopback of the other side leads anywhere."""
    assert await guest.get(internet.web)
    await guest.run(lambda: run("ip", "address", "add", "10.200.0.9/24", "dev", "eth0"))

    def from_another() -> None:
        with socket.create_connection((internet.web, 80), 1, ("10.200.0.9", 0)):
            pass

    with pytest.raises(TimeoutError):
        await guest.run(from_another)
    await guest.run(lambda: Path("/proc/sys/net/ipv4/conf/eth0/route_localnet").write_text("1"))
    await guest.run(lambda: run("ip", "route", "add", "127.9.9.9/32", "via", "10.200.0.1", "table", "main"))
    assert await guest.refused("127.9.9.9")
