"""How the control plane answers what is not quite a request: bodies of any framing, unknown paths, methods, keys."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from sandyard.server import app
from tests.server.conftest import LiveServer


def pieces(*parts: bytes) -> Iterator[bytes]:
    """A body of unknown length: it is sent in chunks."""
    yield from parts


def test_chunked_bodies_and_bodies_of_deletes(api: httpx.Client) -> None:
    body = pieces(b'{"templateID"', b': "ba', b'se", "new": 1}')
    made = api.post("/v2/sandboxes", content=body, headers={"content-type": "application/json"})
    assert made.status_code == 201
    path = f"/sandboxes/{made.json()['sandboxID']}"
    gone = api.request("DELETE", path, json={"why": "done"})
    assert (gone.status_code, gone.content) == (204, b"")
    assert api.request("DELETE", path, content=pieces(b"{}")).status_code == 404


def test_a_body_that_does_not_come_is_not_waited_for(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /sweep HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode())
        answer = b""
        while data := connection.recv(4096):
            answer += data
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":408' in answer


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"templateID": 3}, "templateID"),
        ({}, "templateID"),
        ({"templateID": "base", "timeout": "soon"}, "timeout"),
        ({"templateID": "base", "metadata": {"a": 1}}, "metadata.a"),
        ({"templateID": "base", "envVars": ["A=b"]}, "envVars"),
        ({"templateID": "base", "autoPause": "perhaps"}, "autoPause"),
        ([], "body"),
    ],
)
def test_a_wrong_type_is_named_by_its_field(api: httpx.Client, body: object, field: str) -> None:
    reply = api.post("/v2/sandboxes", json=body)
    assert reply.status_code == 400
    assert reply.json()["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/sandboxe", 404, "did you mean /sandboxes?"),
        ("GET", "/health/", 404, "did you mean /health?"),
        ("GET", "/docs", 404, "no endpoint"),
        ("PATCH", "/teams", 405, "it takes GET"),
        ("TRACE", "/v2/sandboxes", 405, "it takes GET, POST"),
    ],
)
def test_unknown_paths_and_methods(api: httpx.Client, method: str, path: str, status: int, said: str) -> None:
    reply = api.request(method, path)
    assert (reply.status_code, reply.json()["code"]) == (status, status)
    assert said in reply.json()["message"]
    assert ("allow" in reply.headers) == (status == 405)


def test_keys(server: LiveServer) -> None:
    key = server.key
    for headers, status in (
        ([("X-API-Key", key)], 200),
        ([("Authorization", f"Bearer {key}")], 200),
        ([("X-API-Key", key), ("X-API-Key", key)], 401),
        ([("X-API-Key", key), ("x-api-key", "e2b_other")], 401),
        ([("X-API-Key", "")], 401),
        ([], 401),
    ):
        reply = httpx.get(f"{server.url}/teams", headers=headers)
        assert reply.status_code == status, headers
        assert status == 200 or reply.json()["code"] == 401
    assert httpx.get(f"{server.url}/health").status_code == httpx.head(f"{server.url}/health").status_code == 204
    assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_every_endpoint_is_described(api: httpx.Client) -> None:
    described = api.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            where = f"{method} {path}"
            assert operation.get("description"), where
            assert operation["summary"], where
            assert "422" not in operation["responses"], where
            assert ("401" in operation["responses"]) == (path not in ("/health", "/metrics")), where


def test_the_tenant_is_a_team_with_a_history(server: LiveServer, api: httpx.Client) -> None:
    assert api.get("/teams").json() == [{"teamID": "default", "name": "default", "apiKey": "", "isDefault": True}]
    for _ in range(2):
        made = api.post("/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
    api.delete(f"/sandboxes/{made}")
    history = api.get("/teams/default/metrics").json()
    assert len(history) == 241
    assert history[-1]["concurrentSandboxes"] == 1
    assert history[-1]["sandboxStartRate"] == pytest.approx(2 / 15, abs=1e-3)
    assert history[0]["concurrentSandboxes"] == 0
    now = int(time.time())
    assert api.get("/teams/default/metrics", params={"start": now + 60, "end": now + 90}).json() == []
    assert api.get("/teams/default/metrics", params={"start": 9, "end": 8}).status_code == 400
    most = api.get("/teams/default/metrics/max", params={"metric": "concurrent_sandboxes"}).json()
    assert most["value"] == 1
    other = server.call(server.app_keys().issue("other"))
    with server.client(other) as client:
        assert client.get("/teams").json()[0]["teamID"] == "other"
        assert client.get("/teams/default/metrics").status_code == 404
        assert client.get("/teams/other/metrics").json()[-1]["concurrentSandboxes"] == 0
