"""Broken and hostile clients, and agents that lie: the server goes on, quick and without a 500."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sandyard.server.app import ROUTERS
from sandyard.server.envd.connect import frame
from sandyard.server.envd.router import CLIENT_STREAMS, SERVER_STREAMS, UNARY
from tests.server.conftest import LiveServer, memory_settings
from tests.server.hostile_agent import LIAR_MEMORY, WAYS, LyingRuntime
from tests.server.hostile_client import Client, value
from tests.server.vitals import watched
from tests.yard import node_home

# What is allowed on two busy cores: a hang lasts as long as somebody waits, not a second or two.
PROBE_SECONDS = 3.0
USE_SECONDS = 6.0
ROUTES = sorted(
    {
        (method, str(getattr(route, "path", "")))
        for router in ROUTERS
        for route in router.routes
        for method in getattr(route, "methods", None) or ()
    }
)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A server some of whose sandboxes have agents that lie."""
    with node_home() as home:
        live = LiveServer(memory_settings(home, max_count=1000))
        live.runtime = LyingRuntime(home)
        live.start()
        try:
            yield live
        finally:
            live.stop()


@pytest.fixture
def api(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def tasks(server: LiveServer) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return server.call(count())


def settles(server: LiveServer, most: int) -> None:
    """What was given up is not worked on any longer."""
    deadline = time.monotonic() + 15
    while tasks(server) > most:
        assert time.monotonic() < deadline, f"{tasks(server)} tasks are left, of {most} allowed"
        time.sleep(0.1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
def test_clients_that_speak_no_http(server: LiveServer, api: httpx.Client, seed: int) -> None:
    made = api.post("/sandboxes", json={"templateID": "base", "timeout": 300}).json()["sandboxID"]
    client = Client(server, made, random.Random(seed))
    before = tasks(server)
    try:
        with watched(server) as vitals:
            for _ in range(150):
                client.act()
    finally:
        client.close()
    vitals.check(probe=PROBE_SECONDS, use=USE_SECONDS)
    said = b"".join(client.answers)
    statuses = {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", said)}
    assert 400 in statuses
    assert not {500, 501, 503} & statuses
    settles(server, before + 10)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_any_json_on_any_route(server: LiveServer, api: httpx.Client, seed: int) -> None:
    """Whatever the body, the answer is JSON with a code, and its code is the status."""
    rng = random.Random(seed)
    made = api.post("/sandboxes", json={"templateID": "base", "timeout": 300}).json()["sandboxID"]
    with watched(server) as vitals:
        for method, path in ROUTES:
            for _ in range(4):
                known = rng.random() < 0.5 and method != "DELETE" and path != "/sweep"
                names = {"sandbox_id": made if known else "nobody", "template_id:path": "base", "template_id": "base"}
                filled = re.sub(r"{(\w+(?::path)?)}", lambda m, n=names: n.get(m[1], "default"), path)  # type: ignore[misc]
                body = json.dumps(value(rng)).encode()
                headers = {"content-type": rng.choice(["application/json", "text/plain", ""])}
                reply = api.request(method, filled, content=body, headers=headers)
                where = f"{method} {filled} {body[:300]!r} -> {reply.status_code} {reply.text[:300]}"
                assert reply.status_code < 500, where
                if reply.status_code >= 400 and method != "HEAD":
                    assert reply.json()["code"] == reply.status_code, where
                    assert reply.json()["message"], where
            made = alive(api, made)
    vitals.check(probe=PROBE_SECONDS, use=USE_SECONDS)


def alive(api: httpx.Client, sandbox_id: str) -> str:
    reply = api.get(f"/sandboxes/{sandbox_id}")
    if reply.status_code == 200:
        return sandbox_id
    found: str = api.post("/sandboxes", json={"templateID": "base", "timeout": 300}).json()["sandboxID"]
    return found


def use_everything(server: LiveServer, sandbox_id: str) -> list[int]:
    """Every endpoint of envd once, and a port: the statuses (0: the connection broke)."""
    process = {"process": {"pid": 1000}}
    bodies: dict[str, object] = {
        "Start": {"process": {"cmd": "x"}, "stdin": True},
        "SendInput": process | {"input": {"stdin": base64.b64encode(b"x" * 1000).decode()}},
        "SendSignal": process | {"signal": "SIGNAL_SIGKILL"},
        "Update": process | {"pty": {"size": {"rows": 1, "cols": 1}}},
        "Move": {"source": "/a", "destination": "/b"},
        "GetWatcherEvents": {"watcherId": "x"},
        "RemoveWatcher": {"watcherId": "x"},
    }
    headers = {"e2b-sandbox-id": sandbox_id}
    asked = []
    with httpx.Client(base_url=server.url, headers=headers) as client, ThreadPoolExecutor(12) as pool:
        for path in (*SERVER_STREAMS, *UNARY, *CLIENT_STREAMS):
            method = path.rpartition("/")[2]
            body = json.dumps(bodies.get(method, process if "process" in path else {"path": "/tmp"})).encode()
            streaming = path not in UNARY
            kind = {"content-type": "application/connect+json" if streaming else "application/json"}
            asked.append(pool.submit(ask, client, "POST", path, frame(body) if streaming else body, kind))
        for method, path, port in (
            ("GET", "/files?path=/tmp/a", "49983"),
            ("POST", "/files?path=/tmp/a", "49983"),
            ("GET", "/metrics", "49983"),
            ("GET", "/health", "49983"),
            ("POST", "/any", "8080"),
        ):
            asked.append(pool.submit(ask, client, method, path, b"data" * 1000, {"e2b-sandbox-port": port}))
        return [answer.result() for answer in asked]


def ask(client: httpx.Client, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    """The status; 0 where no complete answer came: the stream of a liar need not end."""
    content = body if method == "POST" else None
    try:
        return client.request(method, path, content=content, headers=headers, timeout=2.0).status_code
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ReadTimeout, httpx.WriteError):
        return 0


@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.full), pytest.param(9, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS)
def test_agents_that_lie(server: LiveServer, api: httpx.Client, way: str, seed: int) -> None:
    assert isinstance(server.runtime, LyingRuntime)
    server.runtime.way, server.runtime.seed = way, seed
    before = tasks(server)
    with watched(server) as vitals:
        made = api.post("/sandboxes-cold", json={"image": "base", "memoryMB": LIAR_MEMORY, "autoPause": False})
        assert made.status_code in (201, 500), made.text  # some die before they are handed over
        if made.status_code == 201:
            sandbox_id = made.json()["sandboxID"]
            assert 500 not in use_everything(server, sandbox_id)
            assert api.delete(f"/sandboxes/{sandbox_id}").status_code in (204, 404)
    vitals.check(probe=PROBE_SECONDS, use=USE_SECONDS)
    settles(server, before + 10)


def test_a_client_that_reads_nothing_costs_nobody_else(server: LiveServer, api: httpx.Client) -> None:
    """Output for a client that does not read waits in its own process, not in the server."""
    made = api.post("/sandboxes", json={"templateID": "base", "timeout": 300}).json()["sandboxID"]
    host, port = server.url.removeprefix("http://").split(":")
    body = frame(json.dumps({"process": {"cmd": "cat"}, "stdin": True}).encode())
    head = (
        f"POST /process.Process/Start HTTP/1.1\r\nHost: a\r\nE2b-Sandbox-Id: {made}\r\n"
        f"Content-Type: application/connect+json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with contextlib.ExitStack() as stack, watched(server) as vitals:
        for _ in range(50):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head.encode() + body)
        time.sleep(1.0)
    vitals.check(probe=PROBE_SECONDS, use=USE_SECONDS)
