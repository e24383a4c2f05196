"""One tenant against another: what a hostile one may see, use, change or learn of what is somebody else's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.server.test_pausing import Box
from tests.server.test_snapshots import snapshot
from tests.server.test_templates import begin, build, ended, register

if TYPE_CHECKING:
    from tests.server.conftest import LiveServer


ALIEN = "a" * 64


@pytest.fixture
def other(server: LiveServer) -> Iterator[httpx.Client]:
    """Another tenant."""
    with server.client(server.call(server.app_keys().issue("other"))) as client:
        yield client


def test_nothing_of_a_sandbox_answers_to_another_tenant(api: httpx.Client, other: httpx.Client) -> None:
    running, paused, dead = (Box(api, metadata={"team": "a"}) for _ in range(3))
    assert paused.post("pause").status_code == 204
    assert api.delete(f"/sandboxes/{dead.id}").status_code == 204
    unknown = "0" * len(running.id)
    calls: list[tuple[str, str, dict[str, Any] | None]] = [
        ("GET", "/sandboxes/{}", None),
        ("DELETE", "/sandboxes/{}", None),
        ("GET", "/sandboxes/{}/metrics", None),
        ("GET", "/sandboxes/{}/logs", None),
        ("GET", "/v2/sandboxes/{}/logs", None),
        ("POST", "/sandboxes/{}/pause", {}),
        ("POST", "/sandboxes/{}/connect", {"timeout": 60}),
        ("POST", "/v2/sandboxes/{}/connect", {"timeout": 60}),
        ("POST", "/sandboxes/{}/resume", {"timeout": 60}),
        ("POST", "/sandboxes/{}/timeout", {"timeout": 0}),
        ("POST", "/sandboxes/{}/refreshes", {}),
        ("POST", "/sandboxes/{}/snapshots", {}),
        ("POST", "/sandboxes/{}/fork", {}),
        ("PUT", "/sandboxes/{}/network", {}),
        ("GET", "/sandboxes/{}/custom-extension-params", None),
        ("PATCH", "/sandboxes/{}/custom-extension-params", {"a": 1}),
    ]
    for method, path, body in calls:
        nothing = other.request(method, path.format(unknown), json=body)
        assert nothing.status_code == 404, (path, nothing.text)
        for box in (running, paused, dead):
            reply = other.request(method, path.format(box.id), json=body)
            told = reply.text.replace(box.id, unknown)
            assert (reply.status_code, told) == (404, nothing.text), (method, path, reply.text)
    for listing in ("/sandboxes", "/v2/sandboxes", "/v2/sandboxes?state=paused", "/snapshots"):
        assert other.get(listing).json() == [], listing
    ids = f"{running.id},{paused.id}"
    assert other.get("/sandboxes/metrics", params={"sandbox_ids": ids}).json() == {"sandboxes": {}}
    assert other.post("/sweep", json={"metadata": {"team": "a"}}).json() == {"sandboxIDs": []}
    assert (running.info["state"], paused.info["state"]) == ("running", "paused")


def test_nothing_of_a_private_template_or_snapshot_answers_to_another_tenant(
    api: httpx.Client, other: httpx.Client
) -> None:
    box = Box(api)
    saved = snapshot(box, name="state:v1")
    made = build(api, "secret", "true")
    detail = api.get("/snapshots/state:v1").json()
    names = ["secret", "secret:default", made["templateID"], "state", "state:v1", detail["templateID"]]
    build_ids = [made["buildID"], detail["buildID"]]
    for name in [*names, *(f"{name}:{build_id}" for name in names[:1] for build_id in build_ids)]:
        calls: list[tuple[str, str, dict[str, Any] | None]] = [
            ("GET", f"/templates/{name}", None),
            ("GET", f"/templates/aliases/{name}", None),
            ("GET", f"/templates/{name}/tags", None),
            ("GET", f"/templates/{name}/files/{ALIEN}", None),
            ("PATCH", f"/v2/templates/{name}", {"public": True}),
            ("DELETE", f"/templates/{name}", None),
            ("POST", "/templates/tags", {"target": name, "tags": ["mine"]}),
            ("DELETE", "/templates/tags", {"name": name, "tags": ["default"]}),
            ("GET", f"/snapshots/{name}", None),
            ("POST", "/v2/sandboxes", {"templateID": name}),
            ("POST", "/leases", {"ttl": 60, "warm": [{"templateID": name, "count": 1}]}),
            ("POST", "/sandboxes-cold", {"image": name}),
        ]
        calls += [("GET", f"/templates/{name}/builds/{build_id}/status", None) for build_id in build_ids]
        calls += [("GET", f"/templates/{name}/builds/{build_id}/logs", None) for build_id in build_ids]
        calls += [
            ("POST", f"/v2/templates/{name}/builds/{build_id}", {"fromTemplate": "base"}) for build_id in build_ids
        ]
        for method, path, body in calls:
            reply = other.request(method, path, json=body)
            assert reply.status_code in (400, 404), (method, path, reply.status_code, reply.text)
            for secret in (*build_ids, made["templateID"], box.id):
                assert secret not in reply.text.replace(name, ""), (method, path, reply.text)
        mine = register(other, f"mine-{names.index(name) if name in names else 9}")
        assert begin(other, mine, fromTemplate=name).status_code == 202
        failed = ended(other, mine)
        assert failed["status"] == "error"
        assert "not found" in failed["reason"]["message"]
    assert api.get("/snapshots/state:v1").json()["snapshotID"] == saved["snapshotID"]


def test_what_a_node_tells_of_itself_names_nothing_of_another_tenant(api: httpx.Client, other: httpx.Client) -> None:
    made = build(api, "secret", "true")
    box = Box(api)
    snapshot(box, name="state:v1")
    state = api.get("/snapshots/state:v1").json()["buildID"]
    node = other.get("/nodes").json()[0]["id"]
    theirs, mine = (client.get(f"/nodes/{node}").json()["cachedBuilds"] for client in (other, api))
    assert {made["buildID"], state} <= set(mine)
    assert not {made["buildID"], state} & set(theirs)
    assert theirs  # the node's own are everybody's


def test_the_owner_of_a_public_template_does_not_learn_who_uses_it(api: httpx.Client, other: httpx.Client) -> None:
    made = build(api, "shared", "true")
    assert api.patch(f"/v2/templates/{made['templateID']}", json={"public": True}).status_code == 200
    theirs = Box(other, templateID="shared")
    alone = api.delete("/templates/shared")
    mine = Box(api, templateID="shared")
    both = api.delete("/templates/shared")
    assert (alone.status_code, both.status_code) == (400, 400)
    assert "1 sandboxes use it, 1 of other tenants" in alone.json()["message"]
    assert mine.id in both.text
    assert theirs.id not in alone.text + both.text


def test_a_key_of_one_tenant_for_creates_is_not_that_of_another(api: httpx.Client, other: httpx.Client) -> None:
    headers = {"Idempotency-Key": "same"}
    made = [
        client.post("/v2/sandboxes", json={"templateID": "base"}, headers=headers).json() for client in (api, other)
    ]
    assert made[0]["sandboxID"] != made[1]["sandboxID"]


def test_tokens_are_of_one_sandbox(api: httpx.Client) -> None:
    box = Box(api)
    parent = box.headers["X-Access-Token"]
    child = box.post("fork").json()[0]["sandbox"]
    copy = Box(api, templateID=snapshot(box)["snapshotID"])
    for target in (child["sandboxID"], copy.id):
        headers = {"E2b-Sandbox-Id": target, "X-Access-Token": parent}
        assert api.get("/files", params={"path": "/etc/hostname"}, headers=headers).status_code == 401
    assert box.post("pause").status_code == 204
    assert box.post("connect", {"timeout": 60}).status_code == 201
    box.write("/tmp/a", "b")


def test_a_storm_of_requests_resumes_once(api: httpx.Client) -> None:
    box = Box(api, autoPause=True, autoResume={"enabled": True})
    box.write("/tmp/a", "b")
    assert box.post("pause").status_code == 204
    with ThreadPoolExecutor(25) as pool:
        got = list(pool.map(lambda _: box.read("/tmp/a"), range(100)))
    assert set(got) == {"b"}
    logs = [e["message"] for e in api.get(f"/v2/sandboxes/{box.id}/logs").json()["logs"]]
    assert sum(m.startswith("resumed") for m in logs) == 1, logs
