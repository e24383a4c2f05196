"""Clients and programs inside sandboxes that mean harm: everything is bounded, nothing answers 500."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_websocket

from sandyard.errors import AgentLinkError, BadRequest
from sandyard.guest.base import ProcessSpec, WatchEvent
from sandyard.guest.memory import MemoryAgent, MemoryProcess
from sandyard.server import protocol
from sandyard.server.app import BODY_LIMIT
from sandyard.server.envd import sessions
from sandyard.server.envd.connect import RpcError, frame
from sandyard.server.envd.multipart import PART_LIMIT, MultipartReader
from tests.server.conftest import LiveServer
from tests.server.test_data_plane import Box

HUGE = "9" * 5000  # more digits than Python turns into a number


@pytest.fixture
def box(server: LiveServer, api: httpx.Client) -> Iterator[Box]:
    made = Box(server, api)
    yield made
    made.close()


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def until_closed(connection: socket.socket) -> bytes:
    """What the server says before it hangs up."""
    got = b""
    try:
        while data := connection.recv(65536):
            got += data
    except ConnectionResetError:
        pass  # it hung up with bytes of ours unread
    return got


@pytest.mark.parametrize(
    "body",
    [
        b'{"templateID": "base", "timeout": 1%b}' % (b"0" * 310),
        b'{"templateID": "base", "timeout": -1%b}' % (b"0" * 310),
        b'{"templateID": "base", "timeout": "300"}',
        b'{"templateID": "base", "timeout": true}',
        b'{"templateID": "base", "timeout": 1.5}',
        b'{"templateID": "base", "metadata": {"a": "\\ud800"}}',
        b'{"templateID": "base", "metadata": {"\\ud800": "a"}}',
        b'{"templateID": "base", "envVars": {"a": "\\udfff"}}',
        b'{"templateID": "\xff"}',
        b"[" * 100_000,
        b"",
    ],
)
def test_bodies_that_once_were_500_or_taken(server: LiveServer, api: httpx.Client, body: bytes) -> None:
    reply = api.post("/v2/sandboxes", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["code"]) == (400, 400)
    assert not server.runtime.instances
    assert api.get("/v2/sandboxes").json() == []


@pytest.mark.parametrize("call", ["timeout", "connect", "refreshes"])
def test_lifetimes_beyond_all_numbers(api: httpx.Client, box: Box, call: str) -> None:
    name = "duration" if call == "refreshes" else "timeout"
    body = b'{"%b": 1%b}' % (name.encode(), b"0" * 400)
    reply = api.post(f"/sandboxes/{box.id}/{call}", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert name in reply.json()["message"]


def test_a_time_at_the_end_of_time(api: httpx.Client) -> None:
    for moment in ("9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+23:00"):
        reply = api.get("/v2/sandboxes", params={"startedAfter": moment})
        assert reply.status_code in (200, 400)
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {"E2b-Sandbox-Port": HUGE}),
        ("/files?path=/tmp/f", {"Range": f"bytes=0-{HUGE}"}),
        ("/files?path=/tmp/f", {"Range": f"bytes=-{HUGE}"}),
        ("/files?path=/tmp/f", {"If-Modified-Since": "Mon, 01 Jan 0001 00:00:00 +2300"}),
        (f"/files?path=/tmp/f&signature=x&signature_expiration={HUGE}", {}),
        ("/files?path=/tmp/f&signature=x&signature_expiration=%C2%B2", {}),
    ],
)
def test_numbers_that_are_none(box: Box, path: str, headers: dict[str, str]) -> None:
    box.http.post("/files?path=/tmp/f", content=b"0123")
    for client in (box.http, box.bare):
        reply = client.get(path, headers=headers)
        assert reply.status_code in (200, 400, 401)


def test_a_signed_url_with_no_number_finds_nothing(server: LiveServer, box: Box) -> None:
    for until in (HUGE, "%C2%B2"):
        query = f"path=/tmp/f&signature=x&signature_expiration={until}"
        assert httpx.get(f"{server.url}/files?{query}").status_code == 404


def test_endless_deadlines_and_pings(box: Box) -> None:
    call = frame(json.dumps({"process": {"cmd": "echo", "args": ["hi"]}, "stdin": False}).encode())
    headers = {"content-type": "application/connect+json", "connect-timeout-ms": HUGE, "keepalive-ping-interval": HUGE}
    reply = box.http.post("/process.Process/Start", content=call, headers=headers)
    assert reply.status_code == 200
    assert b"aGkK" in reply.content


def test_a_boundary_beyond_latin_1(box: Box) -> None:
    kind = {"content-type": "multipart/form-data; boundary*=utf-8''%E2%82%AC"}
    assert box.http.post("/files?path=/tmp/f", content=b"x", headers=kind).status_code == 400


async def test_parts_without_end_are_refused() -> None:
    async def body() -> Any:
        while True:
            yield b"--b\r\n\r\n\r\n" * 100

    parts = MultipartReader(b"b", body()).parts()
    for _ in range(PART_LIMIT):
        await anext(parts)
    with pytest.raises(BadRequest, match=f"{PART_LIMIT} parts"):
        await anext(parts)


def test_a_bug_is_told_in_json(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box.agent, "stat", None)
    reply = box.http.get("/files?path=/tmp/f")
    assert (reply.status_code, reply.json()["message"]) == (500, "internal error")


def test_a_body_of_any_size_is_not_read_before_the_key(server: LiveServer) -> None:
    reply = httpx.post(f"{server.url}/v2/sandboxes", content=b" " * (BODY_LIMIT + 1), timeout=20)
    assert (reply.status_code, reply.json()["code"]) == (413, 413)


def endless_header() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\nA: "
    while True:
        yield b"a" * 8192


def endless_headers() -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\n"
    while True:
        yield b"A: b\r\n" * 1000


def endless_trailers() -> Iterator[bytes]:
    yield b"POST /sweep HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"
    while True:
        yield b"A: b\r\n" * 1000


@pytest.mark.parametrize("flood", [endless_header, endless_headers, endless_trailers])
def test_heads_without_end_are_cut_off(server: LiveServer, flood: Callable[[], Iterator[bytes]]) -> None:
    with connect(server) as connection:
        sent = 0
        try:
            for data in flood():
                connection.sendall(data)
                sent += len(data)
                assert sent < 16 << 20, "the server reads on and on"
        except (ConnectionResetError, BrokenPipeError):
            pass  # it hung up, as it must
        answer = until_closed(connection)
    if answer:
        assert b" 431 " in answer.split(b"\r\n")[0]
    assert httpx.get(f"{server.url}/health").status_code == 204


def test_a_client_that_never_ends_its_head_is_hung_up_on(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with connect(server) as silent, connect(server) as slow, connect(server) as second:
        slow.sendall(b"GET / HTTP/1.1\r\nA")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 204")
        second.sendall(b"GET /health HTTP/1.1\r\nA")
        for connection in (silent, slow, second):
            assert until_closed(connection) == b""


def test_what_is_no_http_is_refused_in_json(server: LiveServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["code"] == 400


def test_trailers_are_no_headers(server: LiveServer, api: httpx.Client) -> None:
    with connect(server) as connection:
        request = "POST /sweep HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
        body = '{"metadata":{"a":"b"}}'
        request += f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\nX-API-Key: {server.key}\r\n\r\n"
        connection.sendall(request.encode())
        assert until_closed(connection).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000,
        b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" * 3_000,
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc",
    ],
)
def test_a_port_that_floods_or_lies_is_a_bad_gateway(box: Box, answer: bytes) -> None:
    box.agent.ports[8000] = lambda _data: answer
    reply = box.http.get("/", headers=box.port(8000))
    assert reply.status_code == 502
    assert "did not answer with HTTP" in reply.json()["message"]


def test_a_304_may_name_the_length_it_does_not_send(box: Box) -> None:
    box.agent.ports[8000] = lambda _data: b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nETag: x\r\n\r\n"
    reply = box.http.get("/", headers=box.port(8000))
    assert (reply.status_code, reply.headers["etag"], reply.content) == (304, "x", b"")


def test_our_key_does_not_reach_a_port_and_other_credentials_do(box: Box) -> None:
    requests: list[bytes] = []

    def serve(data: bytes) -> bytes:
        requests.append(data)
        return b"HTTP/1.1 204 No Content\r\n\r\n"

    box.agent.ports[8000] = serve
    box.http.get("/", headers=box.port(8000) | {"Authorization": "Bearer e2b_secret"})
    box.http.get("/", headers=box.port(8000) | {"Authorization": "Bearer theirs"})
    sent = b"".join(requests)
    assert b"e2b_secret" not in sent
    assert b"Bearer theirs" in sent


def test_a_websocket_s_path_cannot_smuggle_headers(server: LiveServer, box: Box) -> None:
    requests: list[bytes] = []

    def serve(data: bytes) -> bytes:
        requests.append(data)
        return b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"

    box.agent.ports[8000] = serve
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8000"}
    url = server.url.replace("http", "ws") + "/a%20HTTP/1.1%0D%0AEvil:%201%0D%0A"
    with pytest.raises(InvalidStatus), connect_websocket(url, additional_headers=headers):
        pytest.fail("it was accepted")
    assert b"\r\nEvil" not in b"".join(requests)
    assert b"".join(requests).startswith(b"GET /a%20HTTP/1.1%0D%0AEvil:%201%0D%0A HTTP/1.1\r\n")


def test_a_client_that_leaves_a_full_stdin_leaves_no_request_behind(
    server: LiveServer, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: MemoryProcess, data: bytes) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryProcess, "write_stdin", full)
    process = server.call(box.agent.spawn(ProcessSpec(argv=["cat"], stdin=True)))
    body = {"process": {"pid": process.pid}, "input": {"stdin": "aGkK"}}
    with pytest.raises(httpx.ReadTimeout):
        box.http.post("/process.Process/SendInput", json=body, timeout=0.3)
    deadline = time.monotonic() + 5
    while server.app.manager.find(box.id).streams:
        assert time.monotonic() < deadline, "the request is still there"
        time.sleep(0.01)


def stream_of_input(pid: int, count: int) -> Iterator[bytes]:
    yield frame(json.dumps({"start": {"process": {"pid": pid}}}).encode())
    for _ in range(count):
        yield frame(json.dumps({"data": {"input": {"stdin": "aGkK"}}}).encode())


@pytest.mark.parametrize("count", [1, 4])
def test_a_stream_into_a_full_stdin_holds_nothing_else_and_ends_with_its_client(
    server: LiveServer, box: Box, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    async def full(self: MemoryProcess, data: bytes) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(MemoryProcess, "write_stdin", full)
    process = server.call(box.agent.spawn(ProcessSpec(argv=["cat"], stdin=True)))
    body, kind = stream_of_input(process.pid, count), {"content-type": "application/connect+json"}
    with pytest.raises(httpx.ReadTimeout):
        box.http.post("/process.Process/StreamInput", content=body, headers=kind, timeout=0.3)
    deadline = time.monotonic() + 5
    while server.app.manager.find(box.id).streams:
        assert time.monotonic() < deadline, "the request is still there"
        time.sleep(0.01)
    selector = {"process": {"pid": process.pid}, "signal": "SIGNAL_SIGKILL"}
    assert box.http.post("/process.Process/SendSignal", json=selector).status_code == 200


def test_a_stream_of_input_is_written_in_order_and_its_errors_are_told(server: LiveServer, box: Box) -> None:
    process = server.call(box.agent.spawn(ProcessSpec(argv=["cat"], stdin=True)))
    kind = {"content-type": "application/connect+json"}
    url = "/process.Process/StreamInput"
    reply = box.http.post(url, content=stream_of_input(process.pid, 3), headers=kind)
    assert reply.content == frame(b"{}") + frame(b"{}", 2)
    assert bytes(process._stdin) == b"hi\n" * 3  # type: ignore[attr-defined]
    for wrong, code in (
        (b"".join([*stream_of_input(process.pid, 1)][1:]), b"invalid_argument"),
        (b"".join(stream_of_input(987654, 1)), b"not_found"),
        (b"".join(stream_of_input(process.pid, 1))[:-1], b"invalid_argument"),
    ):
        assert code in box.http.post(url, content=wrong, headers=kind).content


async def test_of_ended_processes_only_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "KEPT_ENDED", 3)
    agent, kept = MemoryAgent(), sessions.Sessions()
    pids = []
    for _ in range(5):
        process = await agent.spawn(ProcessSpec(["true", "x" * 100_000]))
        session = kept.add(process, {"cmd": "true", "args": ["x" * 100_000]}, None)
        session.start(kept)
        assert (await session.subscribe().next())[1]
        assert (session.config, session.ended is None) == ({}, False)
        pids.append(process.pid)
    for pid in pids[:2]:
        with pytest.raises(RpcError, match="not found"):
            await kept.find(agent, pid, "")
    for pid in pids[2:]:
        assert (await kept.find(agent, pid, "")).ended is not None
        with pytest.raises(RpcError, match="has ended"):
            await kept.find_running(agent, pid, "")


def test_a_huge_command_is_not_kept_while_it_runs(box: Box) -> None:
    config = {"cmd": "sleep", "args": ["30", "x" * 500_000], "envs": {"A": "y" * 500_000}}
    body = json.dumps({"process": config, "stdin": False}).encode()
    kind = {"content-type": "application/connect+json"}
    with box.http.stream("POST", "/process.Process/Start", content=frame(body), headers=kind) as reply:
        assert next(reply.iter_raw())
        listed = box.http.post("/process.Process/List", json={}).json()["processes"]
    assert [process["config"] for process in listed] == [{"cmd": "sleep", "args": ["..."]}]
    tagged = frame(json.dumps({"process": {"cmd": "true"}, "tag": "t" * 1025}).encode())
    assert b"invalid_argument" in box.http.post("/process.Process/Start", content=tagged, headers=kind).content


def test_a_watcher_that_is_lost_says_so_and_gives_its_place_back(server: LiveServer, box: Box) -> None:
    rpc = "/filesystem.Filesystem"
    made = box.http.post(f"{rpc}/CreateWatcher", json={"path": "/tmp"}).json()["watcherId"]
    guest = server.app.data._guests[box.id]

    def lost() -> list[WatchEvent]:
        raise AgentLinkError("the agent closed the link")

    guest.watchers.get(made).watch.pending = lost  # type: ignore[method-assign]
    for says in ("the watcher was lost", "not found"):
        reply = box.http.post(f"{rpc}/GetWatcherEvents", json={"watcherId": made})
        assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
        assert says in reply.json()["message"]
