"""The life of slots: taken, adopted after a crash, dropped; nothing stays behind on any path."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import HostError, NotFound, SandboxError
from sandyard.network import namespace
from sandyard.network.policy import OPEN
from sandyard.network.slots import Slots
from tests.network.conftest import Inside, Internet, eventually, mounted_below, namespaces

pytestmark = pytest.mark.root


async def test_a_slot_is_named_once(slots: Slots) -> None:
    slot = await slots.take("one")
    assert slots.ids() == ["one"]
    assert slots.holds("one")
    assert slot.path.with_name("resolv.conf").read_text() == "nameserver 10.200.0.1\n"
    links = await asyncio.to_thread(os.listdir, slot.path.with_name("sys") / "class" / "net")
    assert sorted(links) == ["eth0", "gw0", "lo"]
    with pytest.raises(SandboxError, match="already"):
        await slots.take("one")
    await slots.drop("one")
    await slots.drop("one")
    assert slots.ids() == []


async def test_inside_there_is_loopback_and_any_port(slots: Slots) -> None:
    inside = Inside((await slots.take("one")).path)

    def serve_and_connect(host: str, family: socket.AddressFamily) -> bool:
        with socket.create_server((host, 80), family=family) as server, socket.create_connection((host, 80), 2):
            server.accept()[0].close()
            return True

    assert await inside.run(lambda: serve_and_connect("127.0.0.1", socket.AF_INET))
    assert await inside.run(lambda: serve_and_connect("10.200.0.2", socket.AF_INET))
    assert await inside.run(lambda: serve_and_connect("::1", socket.AF_INET6))
    assert (await inside.run(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text)).strip() == "0"


async def test_spares_are_made_ahead(slots: Slots) -> None:
    slots.start()
    assert await eventually(lambda: slots.counts()["spares"] == 1)
    await slots.take("one")
    assert await eventually(lambda: slots.counts()["spares"] == 1)


async def test_a_later_server_takes_over(settings: Settings, slots: Slots, internet: Internet) -> None:
    inside = Inside((await slots.take("one", OPEN)).path)
    assert await inside.get(internet.web)
    await slots.stop()
    assert await inside.refused(internet.web)
    assert slots.ids() == ["one"]
    assert await slots.adopt("one") is not None
    assert await inside.refused(internet.web), "nothing is allowed before the policy is there"
    await slots.replace("one", OPEN)
    assert await inside.get(internet.web)
    assert await slots.adopt("one") is not None
    assert await inside.get(internet.web), "what is held stays as it is"
    assert await slots.adopt("another") is None


async def test_a_sandbox_cannot_keep_the_ports_from_a_later_server(slots: Slots, internet: Internet) -> None:
    inside = Inside((await slots.take("one", OPEN)).path)
    held = slots._held["one"].listeners
    ports = [listener.getsockname()[1] for listener in (held.tcp, held.dns_tcp)]
    await slots.stop()
    squatters = [await inside.run(lambda port=port: socket.create_server(("127.0.0.1", port))) for port in ports]  # type: ignore[misc]
    try:
        await slots.adopt("one", OPEN)
        assert await inside.get(internet.web)
    finally:
        for squatter in squatters:
            squatter.close()


async def test_what_a_killed_server_left_is_swept(settings: Settings, slots: Slots) -> None:
    program = f"""
        import asyncio, os, signal
        from pathlib import Path
        from sandyard.config import Settings
        from sandyard.network.slots import Slots

        async def main():
            slots = Slots(Settings.model_validate_json({settings.model_dump_json()!r}))
            slots.start()
            await slots.take("kept"), await slots.take("lost")
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert slots.ids() == ["kept", "lost"]
    await slots.sweep(keep=["kept"])
    assert slots.ids() == ["kept"]
    assert await slots.adopt("kept") is not None


async def test_a_take_that_fails_leaves_nothing(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces()

    def broken(descriptor: int, directory: Path) -> None:
        real(descriptor, directory)
        raise HostError("no more")

    real = namespace.show
    monkeypatch.setattr(namespace, "show", broken)
    with pytest.raises(HostError, match="no more"):
        await slots.take("one")
    assert slots.ids() == []
    assert not mounted_below(slots.directory)
    assert await eventually(lambda: namespaces() <= before)
    monkeypatch.undo()
    assert await slots.take("one")


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.015, 0.025, 0.035])
async def test_a_take_that_is_called_off_leaves_nothing(slots: Slots, delay: float) -> None:
    before = namespaces()
    task = asyncio.create_task(slots.take("one"))
    await asyncio.sleep(delay)
    task.cancel()
    await asyncio.wait((task,))
    if task.cancelled():
        assert slots.ids() == []
        assert await eventually(lambda: namespaces() <= before)
    await slots.drop("one")


async def test_a_host_without_the_tool_is_told(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "TOOL_PATH", "/nowhere")
    with pytest.raises(HostError, match="install iproute2"):
        await slots.take("one")
    assert slots.ids() == []


async def test_the_trial(slots: Slots) -> None:
    assert await slots.probe() == "connections are redirected, private ranges refused"


async def test_dropping_cuts_what_is_open(slots: Slots, internet: Internet) -> None:
    inside = Inside((await slots.take("one", OPEN)).path)
    with await inside.connect(internet.web, 7) as client:
        client.sendall(b"x")
        assert await asyncio.to_thread(client.recv, 1) == b"x"
        assert slots.counts()["connections"] == 1
        await slots.drop("one")
        with pytest.raises(ConnectionResetError):
            await asyncio.to_thread(client.recv, 1)
    with pytest.raises(NotFound):
        await slots.replace("one", OPEN)
