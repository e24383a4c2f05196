"""Snapshots and forks over HTTP and the in-memory runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sandyard.errors import CreateFailed
from tests.server.conftest import LiveServer
from tests.server.test_pausing import BOOT_ID, Box


class Copy(Box):
    """One that a fork made."""

    def __init__(self, api: httpx.Client, made: dict[str, Any]) -> None:
        self.api = api
        self.id = made["sandboxID"]
        self.headers = {"E2b-Sandbox-Id": self.id, "X-Access-Token": made["envdAccessToken"]}


def snapshot(box: Box, **body: object) -> dict[str, Any]:
    reply = box.post("snapshots", body)
    assert reply.status_code == 201, reply.text
    assert reply.headers["x-sandyard-fidelity"] == "files"
    made: dict[str, Any] = reply.json()
    return made


def test_a_snapshot_says_that_it_has_no_memory(api: httpx.Client) -> None:
    box = Box(api)
    box.write("/home/user/file", "then")
    made = snapshot(box)
    assert made["memory"] is False
    assert made["snapshotID"].endswith(":default")
    assert made["names"] == []
    box.write("/home/user/file", "later")
    copies = [Box(api, templateID=made["snapshotID"]) for _ in range(2)]
    assert [copy.read("/home/user/file") for copy in copies] == ["then", "then"]
    assert len({box.read(BOOT_ID), *(copy.read(BOOT_ID) for copy in copies)}) == 3
    assert box.info["state"] == "running"


def test_memory_that_is_demanded_is_refused_before_anything_happens(server: LiveServer, api: httpx.Client) -> None:
    box = Box(api)
    reply = box.post("snapshots", {"memory": True})
    assert reply.status_code == 400
    assert "memory" in reply.json()["message"]
    assert api.get("/snapshots").json() == []
    snapshot(box, memory=False)


def test_snapshots_are_listed_by_page_sandbox_and_name(api: httpx.Client) -> None:
    first, second = Box(api), Box(api)
    made = [snapshot(first, name=f"state:v{n}")["snapshotID"] for n in range(3)]
    other = snapshot(second, name="other")["snapshotID"]

    def ids(**query: object) -> list[str]:
        reply = api.get("/snapshots", params={name: str(value) for name, value in query.items()})
        return [s["snapshotID"] for s in reply.json()]

    assert ids() == [other, *reversed(made)]
    assert ids(sandboxID=first.id) == list(reversed(made))
    assert ids(name="state") == list(reversed(made))
    assert ids(name="state:v1") == ["state:v1"]
    assert ids(name="nothing") == []
    page = api.get("/snapshots", params={"limit": "3"})
    assert [s["snapshotID"] for s in page.json()] == [other, *reversed(made[1:])]
    rest = api.get("/snapshots", params={"limit": "3", "nextToken": page.headers["x-next-token"]})
    assert [s["snapshotID"] for s in rest.json()] == made[:1]
    assert "x-next-token" not in rest.headers
    for wrong in ({"limit": "0"}, {"nextToken": "?"}):
        assert api.get("/snapshots", params=wrong).status_code == 400


def test_one_snapshot_in_detail(api: httpx.Client) -> None:
    box = Box(api)
    made = snapshot(box, name="state:v1")
    detail = api.get("/snapshots/state:v1").json()
    assert detail["snapshotID"] == made["snapshotID"] == "state:v1"
    assert (detail["sandboxID"], detail["imageRef"], detail["layers"]) == (box.id, "base", 1)
    assert detail["sizeBytes"] > 0
    assert detail["memoryMB"] == box.info["memoryMB"]
    assert api.get("/snapshots/state").status_code == 404  # it has no default tag
    assert api.get("/snapshots/nothing").status_code == 404


def test_copies_have_the_memory_where_that_can_be(api: httpx.Client, server: LiveServer) -> None:
    runtime = server.runtime
    runtime.capabilities = replace(runtime.capabilities, memory_snapshot=True)
    box = Box(api)
    for demanded in (False, True):
        reply = box.post("snapshots", {"memory": demanded})
        assert (reply.status_code, reply.headers["x-sandyard-fidelity"]) == (201, "memory")
        assert reply.json()["memory"] is True
    reply = box.post("fork", {"count": 2})
    assert reply.headers["x-sandyard-fidelity"] == "memory"
    assert all(result["memory"] and "sandbox" in result for result in reply.json())
    assert box.post("pause", {"memory": False}).status_code == 204
    assert box.post("snapshots", {"memory": True}).status_code == 400
    reply = box.post("snapshots", {})
    assert (reply.headers["x-sandyard-fidelity"], reply.json()["memory"]) == ("files", False)


def test_names_that_cannot_be(api: httpx.Client) -> None:
    box = Box(api)
    assert box.post("snapshots", {"name": "base"}).status_code == 409
    for name in ("a b", "a:b c", "x" * 200):
        assert box.post("snapshots", {"name": name}).status_code == 400
    assert api.get("/snapshots").json() == []


def test_forks(api: httpx.Client) -> None:
    box = Box(api, metadata={"k": "v"})
    box.write("/home/user/file", "then")
    reply = box.post("fork", {"count": 3, "timeout": 50})
    assert reply.status_code == 201
    assert reply.headers["x-sandyard-fidelity"] == "files"
    results = reply.json()
    assert [set(result) for result in results] == [{"sandbox", "memory"}] * 3
    assert not any(result["memory"] for result in results)
    copies = [Copy(api, result["sandbox"]) for result in results]
    for copy in copies:
        assert copy.read("/home/user/file") == "then"
        assert copy.info["metadata"] == {"k": "v"}
    assert len({copy.headers["X-Access-Token"] for copy in copies} | {box.headers["X-Access-Token"]}) == 4
    assert len({copy.read(BOOT_ID) for copy in copies} | {box.read(BOOT_ID)}) == 4
    copies[0].write("/home/user/file", "mine")
    assert box.read("/home/user/file") == copies[1].read("/home/user/file") == "then"
    assert box.post("fork").status_code == 201  # one, and of the default lifetime


@pytest.mark.parametrize("count", [0, 101, "many"])
def test_fork_counts_are_checked(api: httpx.Client, count: object) -> None:
    assert Box(api).post("fork", {"count": count}).status_code == 400


def test_forks_succeed_or_fail_one_by_one(start_server: Callable[..., Any]) -> None:
    with start_server(max_count=3) as server, server.client() as api:
        box = Box(api)
        server.runtime.fail_next.append(CreateFailed("engine", "no luck"))
        results = box.post("fork", {"count": 4}).json()
        errors = [result["error"] for result in results if "error" in result]
        assert len([result for result in results if "sandbox" in result]) + len(errors) == 4
        assert {error["code"] for error in errors} == {429, 500}
        assert any("no luck" in error["message"] for error in errors)


def test_a_paused_sandbox_is_copied_and_a_dead_one_is_not(api: httpx.Client) -> None:
    box = Box(api)
    box.write("/home/user/file", "then")
    for memory in (True, False):
        assert box.post("pause", {"memory": memory}).status_code == 204
        copy = Copy(api, box.post("fork").json()[0]["sandbox"])
        assert copy.read("/home/user/file") == "then"
        snapshot(box)
        assert box.info["state"] == "paused"
        box.post("connect")
    api.delete(f"/sandboxes/{box.id}")
    for action in ("fork", "snapshots"):
        assert box.post(action).status_code == 404
