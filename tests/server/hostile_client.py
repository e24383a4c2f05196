"""Things a hostile or broken client does to a server's socket, each made from a random generator."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import string
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.server.conftest import LiveServer

RPCS = ["process.Process/Start", "process.Process/Connect", "process.Process/StreamInput", "filesystem.Filesystem/Stat"]
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Client:
    server: LiveServer
    sandbox_id: str
    rng: random.Random
    answers: list[bytes] = field(default_factory=list)
    open: list[socket.socket] = field(default_factory=list)

    def act(self) -> None:
        self.rng.choice(ACTIONS)(self)

    def close(self) -> None:
        for connection in self.open:
            connection.close()

    def head(self, method: str = "GET", path: str = "/v2/sandboxes", *fields: str) -> bytes:
        key = f"X-API-Key: {self.server.key}"
        return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", key, *fields, "", ""]).encode("latin-1")

    def envd(self, path: str, *fields: str) -> bytes:
        return self.head("POST", "/" + path, f"E2b-Sandbox-Id: {self.sandbox_id}", *fields)

    def noise(self, limit: int = 2000) -> bytes:
        return self.rng.randbytes(self.rng.randrange(1, limit))

    def send(self, data: bytes, *, wait: float = 0.05) -> None:
        """Send, look shortly at what comes back, then close, reset or leave the connection open."""
        with contextlib.suppress(OSError):
            connection = self.connect()
            connection.sendall(data)
            connection.settimeout(wait)
            with contextlib.suppress(TimeoutError):
                while got := connection.recv(65536):
                    self.answers.append(got)
            self.part(connection)

    def connect(self) -> socket.socket:
        host, port = self.server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=5)
        self.open.append(connection)
        return connection

    def part(self, connection: socket.socket) -> None:
        how = self.rng.random()
        if how < 0.3 and len(self.open) < 100:
            return  # left half open until the end
        if how < 0.6:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.close()
        self.open.remove(connection)


def garbage(client: Client) -> None:
    client.send(client.noise())


def mutated(client: Client) -> None:
    """A good request with some bytes changed, cut out or doubled."""
    data = bytearray(client.head("POST", "/v2/sandboxes", "Content-Length: 22") + b'{"templateID": "none"}')
    for _ in range(client.rng.randrange(1, 6)):
        at = client.rng.randrange(len(data))
        choice = client.rng.randrange(3)
        if choice == 0:
            data[at] = client.rng.randrange(256)
        elif choice == 1:
            del data[at : at + client.rng.randrange(1, 20)]
        else:
            data[at:at] = data[at : at + client.rng.randrange(1, 20)]
        if not data:
            break
    client.send(bytes(data))


def lengths(client: Client) -> None:
    """Lengths that lie, contradict each other or are no numbers."""
    choices = ["Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 5", "Content-Length: x"]
    choices += ["Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Expect: 100-continue", "Upgrade: h2c"]
    fields = client.rng.sample(choices, client.rng.randrange(1, 4))
    body = client.rng.choice([b"", b"5\r\nabc", b"zz\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n", client.noise(200)])
    client.send(client.head("POST", "/sweep", *fields) + body)


def huge_head(client: Client) -> None:
    fields = [f"X-{i}: {'a' * client.rng.randrange(2000)}" for i in range(client.rng.randrange(1, 200))]
    client.send(client.head("GET", "/health", *fields))


def pipelined(client: Client) -> None:
    requests = [client.head("GET", client.rng.choice(["/health", "/nothing", "/teams"])) for _ in range(50)]
    client.send(b"".join(requests), wait=0.2)


def half_closed(client: Client) -> None:
    with contextlib.suppress(OSError):
        connection = client.connect()
        connection.sendall(client.envd("process.Process/Start", "Content-Type: application/connect+json"))
        connection.shutdown(socket.SHUT_WR)
        client.part(connection)


def frames(client: Client) -> None:
    """Connect frames with flags, lengths and payloads of every kind."""
    path = client.rng.choice(RPCS)
    kind = "application/json" if path.endswith("Stat") else "application/connect+json"
    payload = client.rng.choice([client.noise(), b"{}", b'{"process": 1}', json.dumps(value(client.rng)).encode()])
    size = client.rng.choice([len(payload), 0, 2**31, 2**32 - 1, len(payload) + 7])
    body = struct.pack(">BI", client.rng.choice([0, 0, 1, 2, 255]), size) + payload
    body *= client.rng.randrange(1, 4)
    client.send(client.envd(path, f"Content-Type: {kind}", f"Content-Length: {len(body)}") + body)


def websocket(client: Client) -> None:
    fields = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    fields.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    where = [f"E2b-Sandbox-Id: {client.sandbox_id}", "E2b-Sandbox-Port: 81"] if client.rng.random() < 0.7 else []
    client.send(
        client.head("GET", client.rng.choice(["/", "/proxy/x", "/v2/sandboxes"]), *fields, *where) + client.noise()
    )


def value(rng: random.Random, depth: int = 0) -> object:
    """Any JSON value, with the names and sizes that are most likely to hurt."""
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1.5, 1e308, rng.randrange(1000)])
    if kind < 6:
        return rng.choice(
            ["", "base", "\0", "é😀", "../../etc", "a" * 5000, "\ud800", "".join(rng.choices(string.printable, k=20))]
        )
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randrange(6))}


NAMES = ["templateID", "timeout", "metadata", "envVars", "network", "autoPause", "autoResume", "name", "tags", "steps"]
NAMES += [
    "process",
    "cmd",
    "args",
    "envs",
    "path",
    "count",
    "memory",
    "target",
    "image",
    "ttl",
    "warm",
    "allowOut",
    "x",
]

ACTIONS: list[Callable[[Client], None]] = [
    garbage,
    mutated,
    lengths,
    huge_head,
    pipelined,
    half_closed,
    frames,
    websocket,
]
