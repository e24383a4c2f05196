"""Networked sandboxes as people use them: containers, over the SDK, with an internet of the test's own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from e2b import CommandExitException, Sandbox

from sandyard.config import Settings
from sandyard.images.base import build_base
from sandyard.network.runtime import NetworkedRuntime
from sandyard.network.slots import Slots
from sandyard.runtimes.conformance import run_conformance
from sandyard.runtimes.container import ContainerRuntime
from sandyard.server.embedded import EmbeddedServer
from tests.network.conftest import Internet, mounted_below

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

ALL = "0.0.0.0/0"


@pytest.fixture(autouse=True)
async def base_template() -> None:
    """Built on first use, which takes a minute or two."""
    await build_base(Settings())


@pytest.fixture
def node(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A node with egress, for the SDK of this process; of its slots nothing may be left."""
    yield settings
    directory = Slots(settings).directory
    assert not directory.exists() or not any(directory.iterdir())
    assert not mounted_below(directory)


def point_sdk_at(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def fetch(box: Sandbox, url: str, *options: str) -> str:
    return box.commands.run(f"curl -sS -k --max-time 5 {' '.join(options)} {url}").stdout.strip()


def is_cut(box: Sandbox, url: str, *options: str) -> bool:
    try:
        fetch(box, url, *options)
    except CommandExitException as error:
        return error.exit_code in (6, 7, 35, 56)  # no name, no connection, reset in the handshake or after it
    return False


def test_a_sandbox_has_names_the_internet_and_its_own_ports(
    node: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(node) as server:
        point_sdk_at(server, monkeypatch)
        box = Sandbox.create("base", timeout=120)
        assert fetch(box, "http://good.test/") == f"{internet.web} good.test GET / HTTP/1.1"
        assert fetch(box, f"https://{internet.other}/") == f"{internet.other} hello"
        for address in ("169.254.169.254", internet.private, internet.host, "10.200.0.1", "127.0.0.1"):
            assert is_cut(box, f"http://{address}:{server.url.rpartition(':')[2]}/")
        web = box.commands.run("cd /tmp && echo yes > it && exec python3 -m http.server 80", background=True)
        headers = {"E2b-Sandbox-Id": box.sandbox_id, "E2b-Sandbox-Port": "80"}
        wait_for(lambda: httpx.get(f"{server.url}/it", headers=headers).text == "yes\n")
        assert fetch(box, "http://localhost/it") == "yes"
        web.kill()
        info = httpx.get(f"{server.url}/sandboxes/{box.sandbox_id}", headers={"X-API-Key": server.api_key}).json()
        assert info["allowInternetAccess"] is True
        box.kill()


def test_its_root_has_no_power_over_its_network(
    node: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import ctypes, socket
for kind in (socket.AF_PACKET, socket.AF_INET):
    try:
        socket.socket(kind, socket.SOCK_RAW, 1)
        print("raw socket")
    except PermissionError:
        pass
libc = ctypes.CDLL(None)
print(libc.unshare(0x40000000), open("/proc/sys/net/ipv4/ip_forward").read().strip())
try:
    open("/proc/sys/net/ipv4/ip_forward", "w").write("1")
except OSError as error:
    print(error.errno)
"""
    with EmbeddedServer(node) as server:
        point_sdk_at(server, monkeypatch)
        box = Sandbox.create("base", timeout=120)
        box.files.write("/tmp/try.py", program)
        assert box.commands.run("python3 /tmp/try.py", user="root").stdout == "-1 0\n30\n"
        assert sorted(box.commands.run("ls /sys/class/net").stdout.split()) == ["eth0", "gw0", "lo"]
        assert "Read-only" in box.commands.run("touch /sys/x; true", user="root").stderr
        box.kill()


def test_rules_at_create_and_later(node: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(node) as server:
        point_sdk_at(server, monkeypatch)
        box = Sandbox.create(
            "base", timeout=120, network={"deny_out": [ALL], "allow_out": ["*.good.test", internet.other]}
        )
        assert fetch(box, "https://www.good.test/") == f"{internet.web} hello"
        assert fetch(box, f"http://{internet.other}/")
        assert is_cut(box, "http://good.test/")
        assert is_cut(box, f"http://{internet.web}/")
        assert is_cut(box, f"https://{internet.web}/")
        box.update_network({"deny_out": [internet.other]})
        assert is_cut(box, f"http://{internet.other}/")
        assert fetch(box, "http://good.test/")
        box.update_network({"allow_internet_access": False})
        assert is_cut(box, "http://good.test/")
        box.update_network({})
        assert fetch(box, f"http://{internet.other}/")
        closed = Sandbox.create("base", timeout=120, allow_internet_access=False)
        assert is_cut(closed, f"http://{internet.web}/")
        assert is_cut(closed, "http://good.test/")
        closed.kill()
        box.kill()


def test_rules_outlive_a_server_that_is_killed(
    node: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer(node).start()
    point_sdk_at(server, monkeypatch)
    box = Sandbox.create("base", timeout=120, network={"deny_out": [internet.other]})
    loop = f"while sleep 0.1; do curl -s --max-time 1 http://{internet.web}/ && date +%s%N >> /tmp/reached; done"
    box.commands.run(loop, background=True)
    wait_for(lambda: box.files.exists("/tmp/reached"))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    time.sleep(1)  # for who had its answer, and only has to write it down
    down = time.time_ns()
    time.sleep(1)
    up = time.time_ns()
    with EmbeddedServer(node) as after:
        point_sdk_at(after, monkeypatch)
        again = Sandbox.connect(box.sandbox_id)
        assert fetch(again, f"http://{internet.web}/")
        assert is_cut(again, f"http://{internet.other}/")
        reached = [int(line) for line in again.files.read("/tmp/reached").split()]
        assert reached
        assert not [moment for moment in reached if down < moment < up]
        again.kill()


def test_a_pause_that_keeps_files_gives_the_slot_back(
    node: Settings, internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(node) as server:
        point_sdk_at(server, monkeypatch)
        box = Sandbox.create("base", timeout=120, network={"deny_out": [internet.other]})
        headers = {"X-API-Key": server.api_key}
        paused = httpx.post(f"{server.url}/sandboxes/{box.sandbox_id}/pause", json={"memory": False}, headers=headers)
        assert paused.status_code == 204
        assert not (Slots(node).directory / box.sandbox_id).exists()
        box = Sandbox.connect(box.sandbox_id)
        assert fetch(box, "http://good.test/")
        assert is_cut(box, f"http://{internet.other}/")
        box.kill()


@pytest.mark.full
def test_a_server_killed_in_a_burst_leaves_no_slot_behind(node: Settings) -> None:
    server = EmbeddedServer(node).start()
    assert server.pid is not None

    def create() -> None:
        headers = {"X-API-Key": server.api_key}
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.Client(base_url=server.url, headers=headers, timeout=30) as api,
        ):
            while True:
                api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 120})

    clients = [threading.Thread(target=create) for _ in range(4)]
    for client in clients:
        client.start()
    time.sleep(1)
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    for client in clients:
        client.join()
    assert Slots(node).ids()
    with EmbeddedServer(node) as after:
        headers = {"X-API-Key": after.api_key}
        living = httpx.get(f"{after.url}/v2/sandboxes", params={"limit": 100}, headers=headers, timeout=30).json()
        known = {sandbox["sandboxID"] for sandbox in living}
        metrics = httpx.get(f"{after.url}/metrics", headers=headers).text
        assert known <= set(Slots(node).ids())
        assert "sandyard_network_slots" in metrics


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_the_contract_holds_with_a_network(settings: Settings) -> None:
    runtime = NetworkedRuntime(ContainerRuntime(settings), Slots(settings))
    base = (await build_base(Settings())).rootfs
    try:
        results = await run_conformance(runtime, base)
        assert [f"{each.name}: {each.detail}" for each in results if each.ok is False] == []
        assert await runtime.list() == []
    finally:
        await runtime.close()


def wait_for(true: object) -> None:
    assert callable(true)
    end = time.monotonic() + 15
    while True:
        try:
            if true():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)
