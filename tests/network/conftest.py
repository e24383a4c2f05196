"""A small internet beside the host, reached by routes of its own, and slots that use it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from sandyard.config import NetworkSettings, Settings
from sandyard.network import namespace
from sandyard.network.slots import Slots
from tests.yard import leftovers, node_home, node_settings

T = TypeVar("T")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [
        tool for tool in ("ip", "nft") if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None
    ]
    for item in items:
        if missing and HERE in item.path.parents and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=f"this host has no {' and no '.join(missing)}"))


@dataclass(frozen=True)
class Internet:
    """`web` and `other` are public addresses that serve; `private` and `link_local` serve too, and
    the host reaches them, but no sandbox may. `host` is a public-looking address of the host itself."""

    host: str
    web: str
    other: str
    names: str
    private: str
    link_local: str


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="session")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    a, b, mark = secrets.randbelow(256), secrets.randbelow(256), secrets.token_hex(3)
    public, private, local = f"11.{a}.{b}", f"10.{a}.{b}", f"169.254.{b}"
    net = Internet(f"{public}.1", f"{public}.10", f"{public}.11", f"{public}.53", f"{private}.10", f"{local}.10")
    zone = {
        "good.test": [net.web],
        "www.good.test": [net.web],
        "other.test": [net.other],
        "inner.test": [net.private],
        "rebinding.test": [net.web, net.private],
        "metadata.test": ["169.254.169.254"],
        "home.test": ["127.0.0.1"],
        "self.test": [net.host],
    }
    certificate = tmp_path_factory.mktemp("internet") / "internet.pem"
    make_certificate(certificate)
    space, link = f"sytest-{mark}", f"syt{mark}"
    with ExitStack() as undo:
        run("ip", "netns", "add", space)
        undo.callback(run, "ip", "netns", "del", space)  # the link goes with it
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "addr", "add", f"{net.host}/24", "dev", link)
        run("ip", "link", "set", link, "up")
        for block in (f"{private}.0/24", f"{local}.0/24"):
            run("ip", "route", "add", block, "dev", link)
        inside = ("ip", "netns", "exec", space, "ip")
        for address in (net.web, net.other, net.names):
            run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
        for address in (net.private, net.link_local):
            run(*inside, "addr", "add", f"{address}/32", "dev", "eth0")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        program = [sys.executable, str(HERE / "internet.py"), json.dumps(zone), str(certificate), net.names]
        command = ["ip", "netns", "exec", space, *program]
        server = undo.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        undo.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield net


def make_certificate(path: Path) -> None:
    key = path.with_suffix(".key")
    request = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run(*request, "-days", "2", "-subj", "/CN=internet", "-keyout", str(key), "-out", str(path))
    path.write_text(path.read_text() + key.read_text())


class Inside:
    """A program in a sandbox's network namespace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def run(self, call: Callable[[], T]) -> T:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return await namespace.inside(descriptor, call)
        finally:
            os.close(descriptor)

    async def connect(self, address: str, port: int) -> socket.socket:
        return await self.run(lambda: socket.create_connection((address, port), 5))

    async def get(self, address: str, host: str = "", port: int = 80) -> str:
        """The body that a web server answers; raises `OSError` where there is none."""

        def fetch() -> str:
            with socket.create_connection((address, port), 5) as connection:
                connection.sendall(f"GET / HTTP/1.1\r\nHost: {host or address}\r\n\r\n".encode())
                return _answer(connection)

        return await self.run(fetch)

    async def tls(self, address: str, host: str) -> str:
        """What a TLS server says to who asks for `host`; raises `OSError` where there is none."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

        def fetch() -> str:
            with (
                socket.create_connection((address, 443), 5) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                secure.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                return _answer(secure)

        return await self.run(fetch)

    async def ask(self, message: bytes, server: str) -> bytes:
        def exchange() -> bytes:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.settimeout(8)
                client.connect((server, 53))
                client.send(message)
                return client.recv(4096)

        return await self.run(exchange)

    async def refused(self, address: str, port: int = 80, host: str = "") -> bool:
        try:
            await self.get(address, host, port)
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        return False


def _answer(connection: socket.socket) -> str:
    data = connection.recv(4096)
    if not data:
        raise ConnectionResetError("the connection ended without an answer")
    return data.decode().rpartition("\r\n\r\n")[2].strip()


@pytest.fixture
def home() -> Iterator[Path]:
    with node_home() as path:
        yield path
        assert leftovers(path) == []


@pytest.fixture
def settings(home: Path, internet: Internet) -> Settings:
    network = NetworkSettings(egress="on", resolvers=[IPv4Address(internet.names)], spare=1)
    return node_settings(home).model_copy(update={"network": network})


@pytest_asyncio.fixture
async def slots(settings: Settings) -> AsyncIterator[Slots]:
    """Nothing may be left of them: no mount, no name, no namespace, no thread."""
    before = namespaces()
    opened = Slots(settings)
    yield opened
    for sandbox_id in opened.ids():
        await opened.drop(sandbox_id)
    directory = opened.directory
    await opened.stop()
    assert not directory.exists()
    assert not mounted_below(directory)
    assert await eventually(lambda: namespaces() <= before)


def mounted_below(directory: Path) -> bool:
    return str(directory) in Path("/proc/mounts").read_text()


async def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Whether it became so in time: threads end a moment after what they made."""

    def look() -> bool:
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.01)
        return true()

    return await asyncio.to_thread(look)


def namespaces() -> set[str]:
    """Network namespaces that this process holds, by descriptor or thread."""
    found = set()
    for entry in [*Path("/proc/self/fd").iterdir(), *Path("/proc/self/task").glob("*/ns/net")]:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("net:"):
            found.add(target)
    return found
