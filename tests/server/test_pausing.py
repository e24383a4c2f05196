"""Pause, resume and what traffic does to a paused sandbox, over HTTP and the in-memory runtime."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sandyard.errors import CreateFailed
from sandyard.guest.memory import MemoryAgent
from tests.server.conftest import LiveServer

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def create(api: httpx.Client, **body: object) -> dict[str, Any]:
    reply = api.post("/v2/sandboxes", json={"templateID": "base", **body})
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


class Box:
    """One sandbox as its client sees it: the control plane and its files."""

    def __init__(self, api: httpx.Client, **body: object) -> None:
        self.api = api
        made = create(api, **body)
        self.id = made["sandboxID"]
        self.headers = {"E2b-Sandbox-Id": self.id, "X-Access-Token": made["envdAccessToken"]}

    def post(self, action: str, body: dict[str, object] | None = None) -> httpx.Response:
        return self.api.post(f"/sandboxes/{self.id}/{action}", json=body or {})

    @property
    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/sandboxes/{self.id}").json()
        return found

    def runs(self) -> bool:
        return self.api.get("/health", headers=self.headers).status_code == 204

    def write(self, path: str, text: str) -> None:
        headers = {**self.headers, "content-type": "application/octet-stream"}
        reply = self.api.post("/files", params={"path": path}, content=text, headers=headers)
        assert reply.status_code == 200, reply.text

    def read(self, path: str) -> str:
        reply = self.api.get("/files", params={"path": path}, headers=self.headers)
        assert reply.status_code == 200, reply.text
        return reply.text


def wait_for(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_a_pause_keeps_all_but_stops_it(api: httpx.Client) -> None:
    box = Box(api, metadata={"k": "v"}, timeout=100)
    box.write("/home/user/file", "kept")
    boot_id = box.read(BOOT_ID)
    assert box.post("pause").status_code == 204
    again = box.post("pause")
    assert (again.status_code, again.json()["code"]) == (409, 409)
    assert "already paused" in again.json()["message"]
    info = box.info
    assert (info["state"], info["pauseMode"], info["metadata"]) == ("paused", "full", {"k": "v"})
    gone = api.get("/health", headers=box.headers)
    assert (gone.status_code, gone.json()) == (
        502,
        {"sandboxId": box.id, "message": "The sandbox was not found", "code": 502},
    )
    assert gone.headers["should-retry"] == "false"
    reply = box.post("connect", {"timeout": 200})
    assert reply.status_code == 201
    assert reply.json()["envdAccessToken"] == box.headers["X-Access-Token"]
    assert box.post("connect", {"timeout": 10}).status_code == 200
    assert box.info["state"] == "running"
    assert box.info.get("pauseMode") is None
    assert box.read("/home/user/file") == "kept"
    assert box.read(BOOT_ID) == boot_id


def test_a_pause_of_files_boots_again(api: httpx.Client) -> None:
    box = Box(api)
    box.write("/home/user/file", "kept")
    boot_id = box.read(BOOT_ID)
    assert box.post("pause", {"memory": False}).status_code == 204
    assert box.info["pauseMode"] == "filesystem"
    assert not box.runs()
    assert api.post(f"/v2/sandboxes/{box.id}/connect").status_code == 201
    assert box.read("/home/user/file") == "kept"
    assert box.read(BOOT_ID) != boot_id


def test_memory_can_be_given_up_at_the_resume(api: httpx.Client) -> None:
    box = Box(api)
    boot_id = box.read(BOOT_ID)
    box.post("pause")
    assert api.post(f"/v2/sandboxes/{box.id}/connect", json={"memory": False}).status_code == 201
    assert box.read(BOOT_ID) != boot_id


def test_the_deprecated_resume(api: httpx.Client) -> None:
    box = Box(api)
    assert box.post("resume").status_code == 409
    box.post("pause")
    assert box.post("resume", {"timeout": 50, "autoPause": True}).status_code == 201
    assert box.info["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}


def test_lists_know_both_states(api: httpx.Client) -> None:
    first, second, third = Box(api), Box(api), Box(api)
    second.post("pause")
    third.post("pause", {"memory": False})

    def ids(**query: str) -> list[str]:
        return [s["sandboxID"] for s in api.get("/v2/sandboxes", params={"order": "asc", **query}).json()]

    assert ids() == ids(state="running,paused") == [first.id, second.id, third.id]
    assert ids(state="paused") == [second.id, third.id]
    assert ids(state="running") == [first.id]
    page = api.get("/v2/sandboxes", params={"limit": 2, "order": "asc"})
    assert page.headers["x-total-running"] == "1"
    token = page.headers["x-next-token"]
    assert ids(limit="2", nextToken=token) == [third.id]
    assert [s["sandboxID"] for s in api.get("/sandboxes").json()] == [first.id]
    assert {s["state"] for s in api.get("/v2/sandboxes", params={"state": "paused"}).json()} == {"paused"}


def test_a_paused_sandbox_can_be_killed_and_not_timed(api: httpx.Client) -> None:
    box = Box(api)
    assert box.post("pause").status_code == 204
    for action, body in (("timeout", {"timeout": 5}), ("refreshes", {"duration": 5})):
        reply = box.post(action, dict[str, object](body))
        assert reply.status_code == 409
        assert "connect" in reply.json()["message"]
    assert api.get(f"/sandboxes/{box.id}/metrics").status_code == 200
    assert api.delete(f"/sandboxes/{box.id}").status_code == 204
    assert api.get(f"/sandboxes/{box.id}").status_code == 404
    assert box.post("pause").status_code == 404
    assert box.post("connect").status_code == 404


@pytest.mark.parametrize("memory", [True, False])
def test_the_end_of_its_time_pauses_it_where_asked(api: httpx.Client, memory: bool) -> None:
    box = Box(api, timeout=100, autoPause=True, autoPauseMemory=memory)
    box.write("/home/user/file", "kept")
    boot_id = box.read(BOOT_ID)
    assert box.post("timeout", {"timeout": 0}).status_code == 204
    assert box.info["state"] == "paused"
    assert box.info["pauseMode"] == ("full" if memory else "filesystem")
    assert box.post("connect").status_code == 201
    assert box.read("/home/user/file") == "kept"
    assert (box.read(BOOT_ID) == boot_id) is memory
    short = Box(api, timeout=1, autoPause=True)
    wait_for(lambda: short.info["state"] == "paused")


def test_traffic_resumes_where_asked(server: LiveServer, api: httpx.Client) -> None:
    box = Box(api, timeout=60, autoPause=True, autoResume={"enabled": True})
    box.write("/home/user/file", "kept")
    box.post("pause")
    assert box.info["lifecycle"] == {"autoResume": True, "onTimeout": "pause"}
    assert box.read("/home/user/file") == "kept"
    info = box.info
    assert info["state"] == "running"
    left = server.call(_ends(server, box.id)) - time.time()
    assert 290 < left <= 300
    agent = server.agents[-1]
    assert isinstance(agent, MemoryAgent)
    box.post("pause")
    closed = api.get("/", headers={"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": "8080"})
    assert closed.json()["message"] == "The sandbox is running but port is not open"
    assert box.info["state"] == "running"


async def _ends(server: LiveServer, sandbox_id: str) -> float:
    return server.app.manager.find(sandbox_id).end_at


def test_a_request_without_its_token_resumes_nothing(api: httpx.Client) -> None:
    box = Box(api, autoPause=True, autoResume={"enabled": True})
    box.post("pause")
    for path in ("/health", "/files?path=/x", "/metrics"):
        reply = api.get(path, headers={"E2b-Sandbox-Id": box.id})
        assert reply.status_code == 502, path
    assert box.info["state"] == "paused"
    assert box.runs()
    assert box.info["state"] == "running"


def test_what_was_paused_with_files_only_is_not_resumed_by_traffic(api: httpx.Client) -> None:
    box = Box(api, autoPause=True, autoResume={"enabled": True})
    box.post("pause", {"memory": False})
    assert not box.runs()
    assert box.info["state"] == "paused"


def test_a_resume_for_which_there_is_no_room(start_server: Callable[..., Any]) -> None:
    with start_server(max_count=1) as server, server.client() as api:
        box = Box(api)
        box.post("pause", {"memory": False})
        other = Box(api)
        reply = box.post("connect")
        assert (reply.status_code, reply.json()["error_code"]) == (429, "capacity")
        assert int(reply.headers["retry-after"]) >= 1
        assert box.info["state"] == "paused"
        other.post("pause")  # frozen: it keeps its place
        assert box.post("connect").status_code == 429
        api.delete(f"/sandboxes/{other.id}")
        assert box.post("connect").status_code == 201


def test_a_resume_that_fails_leaves_it_paused(server: LiveServer, api: httpx.Client) -> None:
    box = Box(api)
    box.write("/home/user/file", "kept")
    box.post("pause", {"memory": False})
    server.runtime.fail_next.append(CreateFailed("engine", "no luck"))
    reply = box.post("connect")
    assert reply.status_code == 500
    assert "no luck" in reply.json()["message"]
    assert box.info["state"] == "paused"
    assert box.post("connect").status_code == 201
    assert box.read("/home/user/file") == "kept"


def test_a_pause_may_insist_on_an_answer(server: LiveServer, api: httpx.Client) -> None:
    box = Box(api)
    server.agents[-1].closed = True
    reply = box.post("pause", {"requireHealthyGuest": True})
    assert (reply.status_code, reply.json()["error_code"]) == (503, "sandbox_snapshot_guest_agent_unresponsive")
    assert reply.headers["should-retry"] == "false"
    assert box.info["state"] == "running"


def test_paused_sandboxes_are_another_tenant_s_too(server: LiveServer, api: httpx.Client) -> None:
    box = Box(api)
    box.post("pause")
    key = server.call(server.app_keys().issue("second"))
    with server.client(key) as other:
        for action in ("connect", "resume", "fork", "snapshots", "pause"):
            assert other.post(f"/sandboxes/{box.id}/{action}", json={}).status_code == 404
        assert other.get("/v2/sandboxes").json() == []


def test_the_log_tells_of_moves(api: httpx.Client) -> None:
    box = Box(api)
    box.post("pause")
    box.post("connect")
    box.post("snapshots")
    lines = [entry["message"] for entry in api.get(f"/v2/sandboxes/{box.id}/logs").json()["logs"]]
    assert any(line.startswith("paused with its memory") for line in lines)
    assert "resumed" in lines
    assert any(line.startswith("snapshot ") for line in lines)
