"""The network of a guest: its kernel is its own, its way out is that of every sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from e2b import Sandbox

from sandyard.config import Settings
from sandyard.images.base import build_base
from sandyard.network.policy import CLOSED, OPEN, Policy
from sandyard.network.runtime import NetworkedRuntime
from sandyard.network.slots import Slots
from sandyard.runtimes.base import Resources, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.server.embedded import EmbeddedServer
from tests.network.conftest import Internet
from tests.yard import guest_settings, needs_qemu, node_home, node_settings, share_boots

pytestmark = [pytest.mark.root, pytest.mark.timeout(400), needs_qemu]


@pytest.fixture(scope="module")
def booted() -> Iterator[Settings]:
    """What the first guest booted, for the second: without sandboxes, and without a network."""
    with node_home() as home:
        yield asyncio.run(guest_settings(node_settings(home)))


@pytest_asyncio.fixture
async def guest(settings: Settings, slots: Slots, booted: Settings) -> AsyncIterator[Kit]:
    """A guest with a way out that is closed; afterwards there is none, and no namespace of one."""
    ready = await guest_settings(settings)
    await asyncio.to_thread(share_boots, booted, ready)
    base = (await build_base(Settings())).rootfs
    runtime = NetworkedRuntime(MicroVMRuntime(ready), slots)
    try:
        instance = await runtime.create(SandboxSpec("guest", base, Resources(memory_mb=192, disk_mb=64)))
        await asyncio.to_thread(share_boots, ready, booted)
        yield Kit(runtime, base, instance)
        await runtime.destroy("guest")
        assert await runtime.list() == []
    finally:
        await runtime.destroy("guest")
        await runtime.close()


async def fetch(guest: Kit, url: str, *options: str) -> str:
    return await guest.output(["curl", "-sS", "-k", "--max-time", "40", *options, url])


CUT = (6, 7, 35, 55, 56)  # curl's: no name, no connection, reset at some moment; never a silence


async def how(guest: Kit, url: str) -> int | None:
    """What curl ends with."""
    return (await guest.run(["curl", "-sS", "-k", "--max-time", "40", url], timeout=60)).status.code


async def test_a_guest_reaches_what_its_policy_allows(guest: Kit, slots: Slots, internet: Internet) -> None:
    assert await guest.output("cat /etc/resolv.conf") == "nameserver 10.200.0.1"
    assert await how(guest, f"http://{internet.web}/") in CUT
    await slots.replace("guest", OPEN)
    assert await fetch(guest, "http://good.test/") == f"{internet.web} good.test GET / HTTP/1.1"
    assert await fetch(guest, f"https://{internet.other}/") == f"{internet.other} hello"
    for address in ("169.254.169.254", internet.private, internet.host, "10.200.0.1"):
        assert await how(guest, f"http://{address}/") in CUT, address
    await _datagrams(guest, slots, internet)
    await slots.replace("guest", Policy.of({"allowOut": ["*.good.test"], "denyOut": ["0.0.0.0/0"]}))
    assert await fetch(guest, "https://www.good.test/") == f"{internet.web} hello"
    assert await how(guest, "http://good.test/") in CUT
    await slots.replace("guest", CLOSED)
    assert await how(guest, "https://www.good.test/") in CUT


async def _datagrams(guest: Kit, slots: Slots, internet: Internet) -> None:
    """Nowhere, and then where an address is allowed by name of its block."""
    ask = f"""
import errno, socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(40)
    client.connect(("{internet.web}", 7))
    try:
        client.send(b"x")
        print(client.recv(9))
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    assert await guest.python(ask) == "EHOSTUNREACH"
    await slots.replace("guest", Policy.of({"allowOut": [f"{internet.web}/32"]}))
    assert await guest.python(ask) == "b'x'"
    await slots.replace("guest", OPEN)


async def test_its_root_can_change_its_own_side_only(guest: Kit, slots: Slots, internet: Internet) -> None:
    """Whatever it calls itself, it is let through with its one address, and loopback beyond is not its own."""
    await slots.replace("guest", OPEN)
    web = f"http://{internet.web}/"
    assert await fetch(guest, web)
    await guest.python(SET_ADDRESS.format(address="10.200.0.9"))
    ran = await guest.run(["curl", "-sS", "--max-time", "5", web], timeout=30)
    assert ran.status.code == 28, "what has an address that is not its own gets no answer"
    await guest.python(SET_ADDRESS.format(address="10.200.0.2"))
    await guest.output("echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")
    assert await fetch(guest, web)
    links = await asyncio.to_thread(os.listdir, slots.directory / "guest" / "sys" / "class" / "net")
    assert sorted(links) == ["lo", "tap0"]


@pytest.mark.full
def test_over_the_sdk(settings: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules at create, later, through a pause that keeps memory, and in a fork."""
    with EmbeddedServer(asyncio.run(guest_settings(settings))) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        box = Sandbox.create("base", timeout=300, network={"deny_out": [internet.other]})
        counting = box.commands.run("while sleep 0.2; do date >> /tmp/ticks; done", background=True)
        assert reached(box, f"http://{internet.web}/")
        assert not reached(box, f"http://{internet.other}/")
        box.pause()
        box = Sandbox.connect(box.sandbox_id)
        assert counting.pid in [process.pid for process in box.commands.list()]
        assert reached(box, "http://good.test/")
        assert not reached(box, f"http://{internet.other}/")
        (copy,) = box.fork()
        assert isinstance(copy, Sandbox)
        assert counting.pid in [process.pid for process in copy.commands.list()]
        assert reached(copy, f"http://{internet.web}/")
        assert not reached(copy, f"http://{internet.other}/")
        copy.update_network({"allow_internet_access": False})
        assert not reached(copy, f"http://{internet.web}/")
        assert reached(box, f"http://{internet.web}/")
        copy.kill()
        box.kill()


def reached(box: Sandbox, url: str) -> bool:
    return box.commands.run(f"curl -sS --max-time 40 {url} || true", timeout=60).stdout != ""


SET_ADDRESS = """
import fcntl, socket, struct
def sockaddr(address):
    return struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(address))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, 0x8916, b"eth0".ljust(16, bytes(1)) + sockaddr("{address}"))
    fcntl.ioctl(control, 0x891C, b"eth0".ljust(16, bytes(1)) + sockaddr("255.255.255.0"))
    # struct rtentry: padding, destination, gateway, mask, flags (up, by a gateway), the rest
    route = bytes(8) + sockaddr("0.0.0.0") + sockaddr("10.200.0.1") + sockaddr("0.0.0.0") + struct.pack("=H", 3)
    try:
        fcntl.ioctl(control, 0x890B, route.ljust(120, bytes(1)))
    except FileExistsError:
        pass
"""
