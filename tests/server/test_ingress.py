"""What a sandbox's network object says of traffic to its ports: private ports, another Host, TLS inside."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_websocket

from sandyard.server.tls import own_certificate
from tests.server.conftest import LiveServer
from tests.server.test_data_plane import Box

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@pytest.fixture
def box(server: LiveServer, api: httpx.Client) -> Iterator[Box]:
    made = Box(server, api)
    yield made
    made.close()


def set_network(server: LiveServer, box: Box, network: dict[str, object]) -> None:
    server.app.manager.find(box.id).network = network


def test_private_ports_need_the_traffic_token_and_envd_does_not(
    server: LiveServer, api: httpx.Client, box: Box
) -> None:
    heads: list[bytes] = []

    def serve(data: bytes) -> bytes:
        heads.append(data)
        return ANSWER

    box.agent.ports[8000] = serve
    assert api.post(f"/sandboxes/{box.id}/connect", json={"timeout": 60}).json()["trafficAccessToken"] is None
    set_network(server, box, {"allowPublicTraffic": False})
    token = api.post(f"/sandboxes/{box.id}/connect", json={"timeout": 60}).json()["trafficAccessToken"]
    assert token not in ("", box.token)
    missing = box.http.get("/", headers=box.port(8000))
    assert (missing.status_code, missing.json()["code"], missing.json()["sandboxId"]) == (403, 403, box.id)
    assert "e2b-traffic-access-token is missing" in missing.json()["message"]
    wrong = box.http.get("/", headers=box.port(8000) | {"e2b-traffic-access-token": box.token})
    assert (wrong.status_code, wrong.json()["message"]) == (403, "wrong e2b-traffic-access-token")
    assert heads == []
    assert box.http.get("/", headers=box.port(8000) | {"E2B-Traffic-Access-Token": token}).text == "hi"
    assert token.encode() not in b"".join(heads)
    assert box.http.get("/envs").status_code == 200
    assert box.bare.get("/envs", headers={"X-Access-Token": token}).status_code == 401


def test_private_ports_are_private_to_websockets_too(server: LiveServer, api: httpx.Client, box: Box) -> None:
    set_network(server, box, {"allowPublicTraffic": False})
    status, message = handshake(server, box, 8000)
    assert (status, "e2b-traffic-access-token is missing" in message) == (403, True)
    token = api.post(f"/sandboxes/{box.id}/connect", json={"timeout": 60}).json()["trafficAccessToken"]
    refused = handshake(server, box, 8000, {"e2b-traffic-access-token": token})
    assert refused == (502, "The sandbox is running but port is not open")


def handshake(server: LiveServer, box: Box, port: int, more: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and message of a WebSocket's handshake that is refused."""
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(port)} | (more or {})
    with (
        pytest.raises(InvalidStatus) as refused,
        connect_websocket(server.url.replace("http", "ws"), additional_headers=headers),
    ):
        pytest.fail("it was accepted")
    body = json.loads(bytes(refused.value.response.body or b""))
    assert body["code"] == refused.value.response.status_code
    return body["code"], body["message"]


def test_websockets_are_refused_as_requests_are(server: LiveServer, box: Box) -> None:
    assert handshake(server, box, 9999) == (502, "The sandbox is running but port is not open")
    assert handshake(server, box, 49983) == (400, "envd has no WebSocket")
    box.agent.ports[8000] = lambda _data: ANSWER
    assert handshake(server, box, 8000) == (502, "port 8000 did not open a WebSocket")
    box.id = "nobody"
    assert handshake(server, box, 8000) == (502, "The sandbox was not found")


def test_another_host_for_the_programs(server: LiveServer, box: Box) -> None:
    heads: list[bytes] = []

    def serve(data: bytes) -> bytes:
        heads.append(data)
        return ANSWER

    box.agent.ports[8000] = serve
    set_network(server, box, {"maskRequestHost": "inside.example:${PORT}"})
    box.http.get("/", headers=box.port(8000) | {"Host": "outside.example"})
    assert b"\r\nHost: inside.example:8000\r\n" in heads[0]
    assert b"\r\nX-Forwarded-Host: outside.example\r\n" in heads[0]
    assert handshake(server, box, 8000)[0] == 502
    assert b"\r\nHost: inside.example:8000\r\n" in heads[1]


class TlsProgram:
    """Serves HTTP over TLS, one connection."""

    def __init__(self, folder: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*own_certificate(folder, "inside.test")[1:])
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.request = b""

    def __call__(self, data: bytes) -> bytes:
        self.incoming.write(data)
        try:
            self.tls.do_handshake()
            while True:
                self.request += self.tls.read(65536)
                if self.request.endswith(b"\r\n\r\n"):
                    self.tls.write(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000)
        except ssl.SSLWantReadError:
            return self.outgoing.read()


def test_a_port_inside_may_speak_tls(server: LiveServer, box: Box, tmp_path: Path) -> None:
    program = TlsProgram(tmp_path)
    box.agent.ports[8443] = program
    set_network(server, box, {"httpsPorts": [8443]})
    assert box.http.get("/a", headers=box.port(8443)).text == "x" * 300_000
    assert program.request.startswith(b"GET /a HTTP/1.1\r\n")


def test_a_port_that_was_said_to_speak_tls_and_does_not(server: LiveServer, box: Box) -> None:
    box.agent.ports[8443] = lambda _data: ANSWER
    set_network(server, box, {"httpsPorts": [8443]})
    reply = box.http.get("/", headers=box.port(8443))
    assert reply.status_code == 502
    assert reply.json()["message"].startswith("port 8443 cannot be reached: TLS: ")


def test_a_client_that_leaves_an_endless_response_leaves_nothing_behind(server: LiveServer, box: Box) -> None:
    box.agent.ports[8000] = lambda _data: b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"
    with box.http.stream("GET", "/events", headers=box.port(8000)) as reply:
        assert next(reply.iter_raw())
    deadline = time.monotonic() + 5
    while server.app.manager.find(box.id).streams:
        assert time.monotonic() < deadline, "the request is still there"
        time.sleep(0.01)
