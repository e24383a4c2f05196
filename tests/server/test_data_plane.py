"""Requests to sandboxes over plain HTTP: who may, what a dead one answers, files, ports."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.client import connect as connect_websocket
from websockets.typing import Subprotocol

from sandyard.config import ServerSettings
from sandyard.server.envd.signing import sign
from tests.server.conftest import memory_settings, running

if TYPE_CHECKING:
    from tests.server.conftest import LiveServer

RPC = {"content-type": "application/json"}


class Box:
    """A sandbox, and a client that sends its headers."""

    def __init__(self, server: LiveServer, api: httpx.Client, path: str = "/v2/sandboxes") -> None:
        made = api.post(path, json={"templateID": "base", "timeout": 60, "envVars": {"A": "b"}}).json()
        self.id: str = made["sandboxID"]
        self.token: str = made["envdAccessToken"] or ""
        self.agent = server.agents[-1]
        headers = {"E2b-Sandbox-Id": self.id}
        self.bare = httpx.Client(base_url=server.url, headers=headers, timeout=20)
        self.http = httpx.Client(base_url=server.url, headers=headers | {"X-Access-Token": self.token}, timeout=20)

    def port(self, number: int) -> dict[str, str]:
        return {"E2b-Sandbox-Port": str(number)}

    def close(self) -> None:
        self.bare.close()
        self.http.close()


@pytest.fixture
def box(server: LiveServer, api: httpx.Client) -> Any:
    made = Box(server, api)
    yield made
    made.close()


def test_envd_needs_the_sandbox_s_own_token(server: LiveServer, api: httpx.Client, box: Box) -> None:
    other = Box(server, api)
    rpc = "/process.Process/List"
    assert box.bare.post(rpc, json={}).status_code == 401
    assert box.bare.post(rpc, json={}, headers={"X-Access-Token": other.token}).status_code == 401
    assert box.bare.post(rpc, json={}, headers={"X-API-Key": server.key}).status_code == 401
    assert box.http.post(rpc, json={}).json() == {"processes": []}
    assert box.bare.get("/health").status_code == 204
    assert box.bare.get("/envs").status_code == 401
    assert box.http.get("/envs").json() == {"A": "b"}
    assert set(box.http.get("/metrics").json()) >= {"ts", "cpu_count", "mem_total", "disk_used"}
    assert box.http.post("/init", json={}).status_code == 404
    other.close()


def test_an_unsecured_sandbox_needs_none(server: LiveServer, api: httpx.Client) -> None:
    open_box = Box(server, api, "/sandboxes")
    assert open_box.bare.post("/process.Process/List", json={}).status_code == 200
    open_box.close()


def test_unknown_and_dead_sandboxes_answer_502_as_e2b_does(api: httpx.Client, box: Box) -> None:
    unknown = api.get("/health", headers={"E2b-Sandbox-Id": "nobody"})
    assert unknown.status_code == 502
    assert unknown.json() == {"code": 502, "message": "The sandbox was not found", "sandboxId": "nobody"}
    api.delete(f"/sandboxes/{box.id}")
    dead = box.http.post("/process.Process/List", json={})
    assert dead.status_code == 502
    assert dead.json()["reason"] == "killed"
    assert dead.headers["should-retry"] == "false"
    assert api.get("/health", headers={"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "x"}).status_code == 400


def open_stream(url: str, box_id: str, token: str, command: list[str]) -> socket.socket:
    """A connection on which `Start` streams, past its first event."""
    message = json.dumps({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}).encode()
    body = struct.pack(">BI", 0, len(message)) + message
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: a\r\nE2b-Sandbox-Id: {box_id}\r\nX-Access-Token: {token}\r\n"
        f"Content-Type: application/connect+json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + body)
    got = b""
    while b'"start"' not in got:
        got += connection.recv(65536)
    return connection


def read_on(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def test_a_stream_of_a_killed_sandbox_is_reset(server: LiveServer, api: httpx.Client, box: Box) -> None:
    # Not ended: to some clients an end within a body is no loss of the connection, and they ask no further.
    with open_stream(server.url, box.id, box.token, ["sleep", "50"]) as connection:
        api.delete(f"/sandboxes/{box.id}")
        with pytest.raises(ConnectionResetError):
            read_on(connection)
    assert box.http.get("/health").status_code == 502


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/process.Process/SendSignal", {"process": {"pid": 1234}, "signal": "SIGNAL_SIGKILL"}, 404, "not_found"),
        ("/process.Process/SendSignal", {"process": {"pid": 1234}, "signal": "SIGNAL_X"}, 400, "invalid_argument"),
        ("/process.Process/SendInput", {"process": {}}, 400, "invalid_argument"),
        ("/process.Process/CloseStdin", {"process": {"tag": "none"}}, 404, "not_found"),
        ("/filesystem.Filesystem/Stat", {"path": "/none"}, 404, "not_found"),
        ("/filesystem.Filesystem/Stat", {"path": 5}, 400, "invalid_argument"),
        ("/filesystem.Filesystem/Move", {"source": "/none", "destination": "/x"}, 404, "not_found"),
        ("/filesystem.Filesystem/GetWatcherEvents", {"watcherId": "x"}, 404, "not_found"),
        ("/filesystem.Filesystem/Nothing", {}, 501, "unimplemented"),
    ],
)
def test_rpc_errors_have_a_code_and_its_status(
    box: Box, path: str, body: dict[str, object], status: int, code: str
) -> None:
    reply = box.http.post(path, json=body)
    assert (reply.status_code, reply.json()["code"]) == (status, code)


def test_rpc_bodies_that_are_no_json_object(box: Box) -> None:
    path = "/filesystem.Filesystem/Stat"
    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        assert box.http.post(path, content=body, headers=RPC).json()["code"] == "invalid_argument"
    assert box.http.post(path, content=b"{}", headers={"content-type": "application/proto"}).status_code == 415
    assert box.http.post(path, content=b" " * (5 << 20), headers=RPC).json()["code"] == "resource_exhausted"


def test_a_stream_s_errors_come_in_the_stream(box: Box) -> None:
    headers = {"content-type": "application/connect+json"}
    for body in (b"", b"\0\0\0\0\2{}", b"\0\0\0\0\1{", b"\0\0\0\0\2{}\0\0\0\0\2{}", b"\0\xff\xff\xff\xff"):
        reply = box.http.post("/process.Process/Start", content=body, headers=headers)
        assert reply.status_code == 200
        assert reply.content[0] == 2
        assert "code" in json.loads(reply.content[5:])["error"], body


def test_users_come_by_basic_authentication(box: Box) -> None:
    def as_user(name: str) -> httpx.Response:
        basic = base64.b64encode(f"{name}:".encode()).decode()
        return box.http.post(
            "/filesystem.Filesystem/Stat", json={"path": "~"}, headers={"Authorization": f"Basic {basic}"}
        )

    assert as_user("root").json()["entry"]["path"] == "/root"
    assert as_user("user").json()["entry"]["path"] == "/home/user"
    unknown = as_user("root123")
    assert (unknown.status_code, unknown.json()["message"]) == (401, "invalid username: 'root123'")
    broken = box.http.post("/filesystem.Filesystem/Stat", json={}, headers={"Authorization": "Basic !"})
    assert broken.status_code == 401


def test_ranges_conditions_and_encodings_of_files(box: Box) -> None:
    data = bytes(range(256)) * 8
    where = {"path": "/tmp/f"}
    assert box.http.post("/files", params=where, content=data).json() == [
        {"path": "/tmp/f", "name": "f", "type": "file"}
    ]
    whole = box.http.get("/files", params=where)
    assert whole.content == data
    assert whole.headers["content-length"] == "2048"
    assert whole.headers["content-disposition"].startswith("inline")
    part = box.http.get("/files", params=where, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, data[10:20])
    assert part.headers["content-range"] == "bytes 10-19/2048"
    assert box.http.get("/files", params=where, headers={"Range": "bytes=5000-"}).status_code == 416
    same = box.http.get("/files", params=where, headers={"If-None-Match": whole.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    zipped = box.http.get("/files", params=where, headers={"Accept-Encoding": "gzip"})
    assert (zipped.headers["content-encoding"], zipped.content) == ("gzip", data)
    up = box.http.post(
        "/files", params={"path": "/tmp/g"}, content=gzip.compress(data), headers={"Content-Encoding": "gzip"}
    )
    assert up.status_code == 200
    assert box.http.get("/files", params={"path": "/tmp/g"}).content == data


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"not gzip", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"x" * 1000)[:-9], {"Content-Encoding": "gzip"}, 400),
        (b"x", {"Content-Encoding": "br"}, 400),
        (b"x", {"X-Metadata-" + "k" * 247: "v"}, 400),
        (b"x", {"X-Metadata-Key": "v" * 4085}, 400),
        (b"x", {b"X-Metadata-Key": "é".encode()}, 400),
        (b"no boundary at all", {"Content-Type": "multipart/form-data; boundary=B"}, 400),
    ],
)
def test_bad_uploads_are_refused(
    box: Box, content: bytes, headers: Mapping[str, str] | Mapping[bytes, bytes], status: int
) -> None:
    reply = box.http.post("/files", params={"path": "/tmp/bad"}, content=content, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (status, status)


def test_metadata_of_an_upload_come_back(box: Box) -> None:
    headers = [("X-Metadata-Author", "mish"), ("x-metadata-author", "second"), ("X-Metadata-", "no name")]
    reply = box.http.post("/files", params={"path": "/tmp/m"}, content=b"x", headers=headers)
    assert reply.json() == [{"path": "/tmp/m", "name": "m", "type": "file", "metadata": {"author": "mish"}}]
    rpc = "/filesystem.Filesystem"
    assert box.http.post(f"{rpc}/Stat", json={"path": "/tmp/m"}).json()["entry"]["metadata"] == {"author": "mish"}
    listed = box.http.post(f"{rpc}/ListDir", json={"path": "/tmp"}).json()["entries"]
    assert [entry["metadata"] for entry in listed] == [{"author": "mish"}]
    box.http.post("/files", params={"path": "/tmp/m"}, content=b"y")
    assert box.http.post(f"{rpc}/Stat", json={"path": "/tmp/m"}).json()["entry"]["metadata"] == {}


def test_file_errors_are_those_of_e2b(box: Box) -> None:
    missing = box.http.get("/files", params={"path": "/none"})
    assert (missing.status_code, missing.json()["message"]) == (404, "path '/none' does not exist")
    directory = box.http.get("/files", params={"path": "/tmp"})
    assert (directory.status_code, directory.json()["message"]) == (400, "path '/tmp' is a directory")
    assert box.http.post("/files", content=b"x").status_code == 400
    assert box.http.get("/files", params={"path": "/tmp", "username": "ghost"}).status_code == 401


def test_a_signed_url_opens_one_file_and_finds_its_sandbox(server: LiveServer, box: Box) -> None:
    box.http.post("/files", params={"path": "/tmp/s"}, content=b"signed")
    query = {"path": "/tmp/s", "signature": sign("/tmp/s", "read", "", box.token)}
    assert box.bare.get("/files", params=query).content == b"signed"
    assert httpx.get(f"{server.url}/files", params=query).content == b"signed"
    for wrong, message in (
        ({**query, "path": "/tmp/t"}, "invalid signature"),
        ({"path": "/tmp/s"}, "missing signature query parameter"),
        (
            {
                "path": "/tmp/s",
                "signature": sign("/tmp/s", "read", "", box.token, 1),
                "signature_expiration": "1",
            },
            "signature is already expired",
        ),
    ):
        reply = box.bare.get("/files", params=wrong)
        assert (reply.status_code, reply.json()) == (401, {"code": 401, "message": message})
    assert box.bare.post("/files", params=query, content=b"x").status_code == 401


def test_a_port_of_a_sandbox_is_reached_without_its_token(box: Box) -> None:
    requests: list[bytes] = []

    def serve(data: bytes) -> bytes:
        requests.append(data)
        if b"\r\n\r\n" not in b"".join(requests):
            return b""
        return b"HTTP/1.1 201 Created\r\nX-From: inside\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"

    box.agent.ports[8000] = serve
    reply = box.http.get("/a%2Fb?x=1", headers=box.port(8000) | {"X-API-Key": "secret", "X-Mine": "1"})
    assert (reply.status_code, reply.content, reply.headers["x-from"]) == (201, b"hello", "inside")
    sent = b"".join(requests)
    assert sent.startswith(b"GET /a%2Fb?x=1 HTTP/1.1\r\n")
    assert b"X-Mine: 1" in sent
    assert b"secret" not in sent
    assert box.token.encode() not in sent


def test_a_closed_port_is_told_from_a_dead_sandbox(box: Box) -> None:
    reply = box.http.get("/", headers=box.port(9999))
    assert reply.status_code == 502
    assert reply.json() == {
        "code": 502,
        "message": "The sandbox is running but port is not open",
        "sandboxId": box.id,
        "port": 9999,
    }


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"])
def test_a_port_that_does_not_speak_http(box: Box, answer: bytes) -> None:
    box.agent.ports[8000] = lambda _data: answer
    reply = box.http.get("/", headers=box.port(8000))
    assert reply.status_code == 502
    assert "did not answer with HTTP" in reply.json()["message"]


def test_host_names_lead_to_sandboxes_where_a_domain_is_set(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path).model_copy(
        update={"server": ServerSettings.model_validate({"domain": "yard.test", "port": 0})}
    )
    with running(settings) as server, server.client() as api:
        made = api.post("/v2/sandboxes", json={"templateID": "base"}).json()
        assert made["domain"] == "yard.test"
        host = {"Host": f"49983-{made['sandboxID']}.yard.test"}
        assert httpx.get(f"{server.url}/health", headers=host).status_code == 204
        assert httpx.get(f"{server.url}/health", headers={"Host": "49983-nobody.yard.test"}).status_code == 502


def test_a_websocket_passes_through_both_ways(server: LiveServer, box: Box) -> None:
    inside = ServerProtocol(subprotocols=[Subprotocol("chat")])

    def serve(data: bytes) -> bytes:
        inside.receive_data(data)
        for event in inside.events_received():
            if isinstance(event, Request):
                inside.send_response(inside.accept(event))
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                inside.send_text(b"you said " + bytes(event.data))
            elif isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                inside.send_binary(bytes(event.data)[::-1])
        return b"".join(inside.data_to_send())

    box.agent.ports[8000] = serve
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
    url = server.url.replace("http", "ws") + "/talk"
    with connect_websocket(url, additional_headers=headers, subprotocols=[Subprotocol("chat")]) as outside:
        assert outside.subprotocol == "chat"
        outside.send("hé")
        assert outside.recv(5) == "you said hé"
        outside.send(b"\x01\x02")
        assert outside.recv(5) == b"\x02\x01"


def test_a_websocket_to_a_closed_port_or_an_unknown_sandbox_is_refused(server: LiveServer, box: Box) -> None:
    url = server.url.replace("http", "ws")
    for sandbox_id in (box.id, "nobody"):
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "9999"}
        with pytest.raises(InvalidStatus), connect_websocket(url, additional_headers=headers):
            pytest.fail("it was accepted")


def test_idle_time_counts_requests_as_use(start_server: Callable[..., Any]) -> None:
    with start_server() as server, server.client() as api:
        made = api.post("/sandboxes", json={"templateID": "base", "metadata": {"sandyard.idle_timeout": "0.6"}}).json()[
            "sandboxID"
        ]
        headers = {"E2b-Sandbox-Id": made}
        for _ in range(5):
            time.sleep(0.3)
            assert api.get("/health", headers=headers).status_code == 204
        time.sleep(1.5)
        assert api.get("/health", headers=headers).status_code == 502
