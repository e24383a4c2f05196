"""AgentENV's clients: cold starts, `/proxy`, nodes, and an extension that is told of the life of sandboxes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect as connect_websocket

from sandyard.config import ExtensionSettings, ImageSettings, ServerSettings
from sandyard.errors import DeathReason
from sandyard.server import agentproxy
from tests.server.conftest import LiveServer, memory_settings, running
from tests.server.test_data_plane import Box
from tests.server.test_pausing import wait_for

ENVD = 49983


class Recorder:
    """An extension: keeps what it is told, and answers as it is set to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.status: dict[str, int] = {}
        self.delay: dict[str, float] = {}
        self.body: dict[str, bytes] = {}
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                hook = self.path.removeprefix("/base/sandbox-hook/")
                recorder.calls.append((hook, body))
                time.sleep(recorder.delay.get(hook, 0))
                answer = recorder.body.get(hook, b"{}")
                self.send_response(recorder.status.get(hook, 200))
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the server may have given up
                    self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/base/"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def hooks(self) -> list[str]:
        return [hook for hook, _ in self.calls]

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 5
        while len(self.calls) < count:
            assert time.monotonic() < deadline, self.calls
            time.sleep(0.01)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    yield made
    made.close()


@pytest.fixture
def extended(tmp_path: Path, recorder: Recorder) -> Iterator[LiveServer]:
    settings = memory_settings(tmp_path)
    with running(
        settings.model_copy(update={"extension": ExtensionSettings(url=recorder.url, timeout_ms=500)})
    ) as live:
        yield live


@pytest.fixture
def box(server: LiveServer, api: httpx.Client) -> Iterator[Box]:
    made = Box(server, api)
    yield made
    made.close()


def cold(api: httpx.Client, **body: object) -> httpx.Response:
    return api.post("/sandboxes-cold", json={"image": "base", **body})


def test_a_cold_start_has_the_size_that_was_asked_for(api: httpx.Client) -> None:
    reply = cold(api, cpuCount=2, memoryMB=128, diskSizeMB=2048, metadata={"a": "b"}, timeout=60)
    assert reply.status_code == 201, reply.text
    made = reply.json()
    assert reply.headers["x-agentenv-sandbox-id"] == made["sandboxID"]
    assert made["envdAccessToken"] is None
    info = api.get(f"/sandboxes/{made['sandboxID']}").json()
    assert (info["cpuCount"], info["memoryMB"], info["diskSizeMB"]) == (2, 128, 2048)
    assert (info["metadata"], info["alias"]) == ({"a": "b"}, "base")
    assert info["lifecycle"]["onTimeout"] == "pause"  # as AgentENV has it
    usual = api.get(f"/sandboxes/{cold(api, secure=True).json()['sandboxID']}").json()
    assert (usual["memoryMB"], bool(usual["envdAccessToken"])) == (512, True)


def test_images_are_found_by_alias_and_by_name(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    images = ImageSettings(aliases={"registry.example/team/app:1": "base"})
    with running(settings.model_copy(update={"images": images})) as server, server.client() as api:
        for image in ("registry.example/team/app:1", "base", "base:latest", "docker.io/library/base"):
            assert cold(api, image=image).status_code == 201, image
        missing = cold(api, image="ubuntu:22.04")
        assert (missing.status_code, missing.json()["code"]) == (404, 404)
        assert "image 'ubuntu:22.04' stands for no template" in missing.json()["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memoryMB", 127),
        ("diskSizeMB", 1500),
        ("cpuCount", 0),
        ("cpuCount", "two"),
        ("image", ""),
        ("attachedDrives", [{"driveID": "a"}]),
        ("extraBootArgs", "quiet"),
        ("customExtensionParams", {"vpn": 1}),
    ],
)
def test_what_a_cold_start_cannot_have_is_refused_by_name(server: LiveServer, field: str, value: object) -> None:
    with server.client() as api:
        reply = cold(api, **{field: value})
    assert reply.status_code == 400
    assert reply.json()["message"].startswith(f"{field}: ")
    assert not server.runtime.instances


@pytest.mark.parametrize("prefix", ["x-agentenv", "e2b"])
def test_the_proxy_strips_its_headers_and_tells_what_was_asked(box: Box, server: LiveServer, prefix: str) -> None:
    seen: list[bytes] = []

    def serve(data: bytes) -> bytes:
        seen.append(data)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"

    box.agent.ports[8080] = serve
    port = "target-port" if prefix == "x-agentenv" else "sandbox-port"
    headers = {f"{prefix}-sandbox-id": box.id, f"{prefix}-{port}": "8080", "x-forwarded-uri": "/lie", "a": "b"}
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.get("/proxy/some/path%20x?q=1").text == "hi"
        assert client.get("/proxy").text == "hi"
        assert client.delete("/proxy/").text == "hi"
    heads = [data.split(b"\r\n")[0] for data in seen]
    assert heads == [b"GET /some/path%20x?q=1 HTTP/1.1", b"GET / HTTP/1.1", b"DELETE / HTTP/1.1"]
    first = seen[0].lower()
    assert b"sandbox-id" not in first
    assert b"port: 8080" not in first
    assert b"/lie" not in first
    assert b"\r\na: b\r\n" in first
    assert b"x-forwarded-method: get\r\n" in first
    assert b"x-forwarded-uri: /proxy/some/path%20x?q=1\r\n" in first
    assert first.count(b"x-forwarded-host: ") == first.count(b"x-forwarded-proto: ") == 1


def test_the_proxy_s_refusals(box: Box, server: LiveServer) -> None:
    def status(headers: dict[str, str], path: str = "/proxy/health") -> int:
        reply = httpx.get(server.url + path, headers=headers)
        assert not reply.content or reply.json()["code"] == reply.status_code
        return reply.status_code

    one = {"x-agentenv-sandbox-id": box.id}
    assert status({}) == 400
    assert status(one) == 400
    for port in ("0", "65536", "x", "9" * 50):
        assert status(one | {"x-agentenv-target-port": port}) == 400
    assert status({"x-agentenv-sandbox-id": "nobody", "x-agentenv-target-port": "80"}) == 404
    assert status(one | {"x-agentenv-target-port": "80"}) == 502
    envd = one | {"x-agentenv-target-port": str(ENVD)}
    assert status(envd) == 401
    assert status(envd | {"x-access-token": "wrong"}) == 401
    assert status(envd | {"x-access-token": box.token}) == 204
    assert status(envd, "/proxy/files?path=/tmp/f") == 401
    assert status(one | {"x-agentenv-target-port": str(ENVD)}, "/proxyhealth") == 404
    server.call(server.app.manager.kill(box.id, DeathReason.KILLED))
    assert status(envd) == 404


def test_an_answer_that_never_begins_is_a_504(box: Box, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentproxy, "ANSWER_SECONDS", 0.2)
    box.agent.ports[8080] = lambda _data: b""
    headers = {"x-agentenv-sandbox-id": box.id, "x-agentenv-target-port": "8080"}
    reply = httpx.get(f"{server.url}/proxy/", headers=headers)
    assert (reply.status_code, reply.json()["port"]) == (504, 8080)
    assert "did not answer within 0.2 s" in reply.json()["message"]


def test_a_websocket_through_the_proxy_is_refused_like_a_request(box: Box, server: LiveServer) -> None:
    url = server.url.replace("http", "ws") + "/proxy/chat"
    for headers, status in (({}, 400), ({"x-agentenv-sandbox-id": box.id, "x-agentenv-target-port": "81"}, 502)):
        with pytest.raises(InvalidStatus) as refused:
            connect_websocket(url, additional_headers=headers)
        response = refused.value.response
        assert (response.status_code, json.loads(response.body)["code"]) == (status, status)


def test_a_paused_sandbox_is_gone_for_the_proxy_unless_traffic_resumes_it(
    server: LiveServer, api: httpx.Client
) -> None:
    for auto_resume, status in ((False, 410), (True, 502)):
        body = {"templateID": "base", "autoPause": True, "autoResume": {"enabled": auto_resume}, "timeout": 60}
        made = api.post("/sandboxes", json=body).json()["sandboxID"]
        assert api.post(f"/sandboxes/{made}/pause").status_code == 204
        headers = {"x-agentenv-sandbox-id": made, "x-agentenv-target-port": "8080"}
        reply = httpx.get(f"{server.url}/proxy/", headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (status, status)
        state = api.get(f"/sandboxes/{made}").json()["state"]
        assert state == ("running" if auto_resume else "paused")


def test_a_host_name_wins_over_the_proxy_s_path(tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    named = settings.model_copy(update={"server": ServerSettings(port=0, domain="yard.test")})
    with running(named) as server, server.client() as api:
        box = Box(server, api)
        seen: list[bytes] = []

        def serve(data: bytes) -> bytes:
            seen.append(data)
            return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

        box.agent.ports[8080] = serve
        headers = {"host": f"8080-{box.id}.yard.test", "x-agentenv-sandbox-id": "nobody"}
        assert httpx.get(f"{server.url}/proxy/x", headers=headers).status_code == 200
        assert seen[0].startswith(b"GET /proxy/x ")
        box.close()


def test_nodes(api: httpx.Client) -> None:
    cold(api, memoryMB=256)
    [node] = api.get("/nodes").json()
    assert (node["status"], node["sandboxCount"], node["createSuccesses"], node["createFails"]) == ("ready", 1, 1, 0)
    figures = node["metrics"]
    assert figures["allocatedMemoryBytes"] == 256 << 20
    assert 0 < figures["memoryUsedBytes"] < figures["memoryTotalBytes"]
    assert figures["disks"][0]["totalBytes"] > figures["disks"][0]["usedBytes"]
    assert node["machineInfo"]["cpuArchitecture"]
    detail = api.get(f"/nodes/{node['id']}").json()
    assert detail["cachedBuilds"]
    assert api.get("/nodes/nosuch").status_code == 404


def test_an_extension_is_told_of_start_patch_and_stop(extended: LiveServer, recorder: Recorder) -> None:
    recorder.body["patch-params"] = b'{"customExtensionParams": {"vpn": 2}}'
    with extended.client() as api:
        made = api.post("/v2/sandboxes", json={"templateID": "base", "customExtensionParams": {"vpn": 1}}).json()
        path = f"/sandboxes/{made['sandboxID']}/custom-extension-params"
        assert api.get(path).json() == {"vpn": 1}
        assert api.patch(path, json={"add": 1}).json() == {"vpn": 2}
        assert api.get(path).json() == {"vpn": 2}
        assert api.delete(f"/sandboxes/{made['sandboxID']}").status_code == 204
        assert api.get(path).status_code == 404
    recorder.wait(3)
    assert recorder.hooks() == ["start-fresh", "patch-params", "stop"]
    start, patch, stop = (body for _, body in recorder.calls)
    assert start["customExtensionParams"] == {"vpn": 1}
    assert patch == {"sandboxId": made["sandboxID"], "patch": {"add": 1}}
    assert stop == {"sandboxId": made["sandboxID"], "sandboxInstanceId": start["sandboxInstanceId"]}


@pytest.mark.parametrize("how", ["status", "delay", "gone"])
def test_a_start_that_the_extension_refuses_leaves_nothing(extended: LiveServer, recorder: Recorder, how: str) -> None:
    if how == "status":
        recorder.status["start-fresh"], recorder.body["start-fresh"] = 503, b"no vpn left"
    elif how == "delay":
        recorder.delay["start-fresh"] = 1.0
    else:
        recorder.close()  # idempotent
    with extended.client() as api:
        reply = api.post("/v2/sandboxes", json={"templateID": "base"})
        assert reply.status_code == 500
        assert reply.json()["message"].startswith("create failed at extension: extension hook start-fresh")
        assert ("503: no vpn left" in reply.text) == (how == "status")
        assert api.get("/v2/sandboxes").json() == []
        assert api.get("/nodes").json()[0]["createFails"] == 1
    wait_for(lambda: len(extended.runtime.instances) == extended.app.manager.pool.ready)
    assert "stop" not in recorder.hooks()


def test_a_patch_that_is_refused_changes_nothing_and_a_stop_never_fails(
    extended: LiveServer, recorder: Recorder
) -> None:
    with extended.client() as api:
        made = api.post("/sandboxes", json={"templateID": "base", "customExtensionParams": {"vpn": 1}}).json()
        path = f"/sandboxes/{made['sandboxID']}/custom-extension-params"
        recorder.status["patch-params"] = 422
        assert api.patch(path, json={}).status_code == 400
        recorder.status["patch-params"] = 200
        untellable = b'{"customExtensionParams": {"a": NaN}}', b'{"customExtensionParams": {"a": "\\ud800"}}'
        for answer in (b"[]", b"{}", b"[" * 100_000, b'{"customExtensionParams": 3}', *untellable):
            recorder.body["patch-params"] = answer
            assert api.patch(path, json={}).status_code == 400
        assert api.patch(path, json=[1]).status_code == 400
        half = b'{"templateID": "base", "customExtensionParams": {"a": "\\ud800"}}'
        kind = {"content-type": "application/json"}
        assert api.post("/sandboxes", content=half, headers=kind).status_code == 400
        assert api.get(path).json() == {"vpn": 1}
        recorder.status["stop"] = 500
        assert api.delete(f"/sandboxes/{made['sandboxID']}").status_code == 204


def test_a_pause_is_a_stop_and_a_resume_is_a_start_of_a_new_instance(extended: LiveServer, recorder: Recorder) -> None:
    with extended.client() as api:
        made = api.post("/v2/sandboxes", json={"templateID": "base", "customExtensionParams": {"vpn": 1}}).json()
        path = f"/sandboxes/{made['sandboxID']}"
        assert api.post(f"{path}/pause").status_code == 204
        recorder.wait(2)
        recorder.status["start-resume"] = 503
        assert api.post(f"{path}/connect", json={"timeout": 60}).status_code == 500
        assert api.get(path).json()["state"] == "paused"
        recorder.status["start-resume"] = 200
        assert api.post(f"{path}/connect", json={"timeout": 60}).status_code == 201
        assert api.delete(path).status_code == 204
    recorder.wait(5)
    assert recorder.hooks() == ["start-fresh", "stop", "start-resume", "start-resume", "stop"]
    instances = [body["sandboxInstanceId"] for _, body in recorder.calls]
    assert instances[0] == instances[1] != instances[3] == instances[4]
    assert recorder.calls[3][1]["customExtensionParams"] == {"vpn": 1}


def test_a_fork_is_an_instance_of_its_own_with_the_parameters_of_its_parent(
    extended: LiveServer, recorder: Recorder
) -> None:
    with extended.client() as api:
        made = api.post("/v2/sandboxes", json={"templateID": "base", "customExtensionParams": {"vpn": 1}}).json()
        [child] = api.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 1}).json()
        recorder.status["start-fresh"] = 503
        [refused] = api.post(f"/sandboxes/{made['sandboxID']}/fork", json={"count": 1}).json()
        assert "extension" in refused["error"]["message"]
        assert api.delete(f"/sandboxes/{child['sandbox']['sandboxID']}").status_code == 204
    recorder.wait(4)
    assert recorder.hooks() == ["start-fresh", "start-fresh", "start-fresh", "stop"]
    parent, born, _, gone = (body for _, body in recorder.calls)
    assert parent["customExtensionParams"] == born["customExtensionParams"] == {"vpn": 1}
    assert parent["sandboxInstanceId"] != born["sandboxInstanceId"] == gone["sandboxInstanceId"]


def test_parameters_are_recorded_with_the_sandbox(tmp_path: Path, recorder: Recorder) -> None:
    settings = memory_settings(tmp_path)
    keeping = settings.model_copy(
        update={
            "extension": ExtensionSettings(url=recorder.url),
            "server": ServerSettings(port=0, keep_sandboxes=True),
        }
    )
    with running(keeping) as server, server.client() as api:
        made = api.post("/v2/sandboxes", json={"templateID": "base", "customExtensionParams": {"vpn": 1}}).json()
        runtime = server.runtime
        records = server.call(server.app.manager.store.living())
        assert records[0].extension["params"] == {"vpn": 1}
        assert made["sandboxID"] in runtime.instances  # the pool may have more


def test_another_tenant_cannot_touch_parameters(server: LiveServer, box: Box) -> None:
    with server.client(server.call(server.app_keys().issue("other"))) as other:
        path = f"/sandboxes/{box.id}/custom-extension-params"
        assert other.get(path).status_code == other.patch(path, json={}).status_code == 404
