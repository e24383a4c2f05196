"""The REST API, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest

from sandyard.config import PoolSettings
from sandyard.errors import CreateFailed, DeathReason, HostError
from sandyard.runtimes.base import Capabilities
from sandyard.runtimes.memory import MemoryRuntime
from tests.server.conftest import LiveServer, memory_settings, running


def create(api: httpx.Client, path: str = "/v2/sandboxes", **body: object) -> dict[str, Any]:
    reply = api.post(path, json={"templateID": "base", "timeout": 60, **body})
    assert reply.status_code == 201, reply.text
    made: dict[str, Any] = reply.json()
    return made


def test_health_and_metrics_need_no_key(tmp_path: Path) -> None:
    # No pool, which would have another one made after this, sooner or later.
    with running(memory_settings(tmp_path).model_copy(update={"pool": PoolSettings(low=0, high=0)})) as server:
        assert httpx.get(f"{server.url}/health").status_code == 204
        with server.client() as api:
            create(api)
        text = httpx.get(f"{server.url}/metrics").text
    assert "sandyard_sandboxes_running 1.0" in text
    figures = dict(line.split(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(figures["sandyard_memory_promised_bytes"]) == 512 << 20
    assert float(figures["sandyard_memory_budget_bytes"]) > 512 << 20
    assert 'sandyard_create_seconds_count{kind="cold"} 1.0' in text
    assert "sandyard_memory_ready_bytes" not in figures


def test_metrics_tell_what_stands_ready(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryRuntime, "ready_bytes", lambda _: 64 << 20)
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = {float(line.split()[1]) for line in lines if line.startswith("sandyard_memory_ready_bytes ")}
    assert found == {64 << 20}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-API-Key", "e2b_" + "0" * 40)],
        [("X-API-Key", "")],
        [("Authorization", "Bearer nonsense")],
    ],
)
def test_a_wrong_or_missing_key_is_401(server: LiveServer, headers: list[tuple[str, str]]) -> None:
    reply = httpx.get(f"{server.url}/v2/sandboxes", headers=headers)
    assert reply.status_code == 401
    assert reply.json()["code"] == 401
    assert server.key not in reply.text


def test_two_keys_at_once_are_refused(server: LiveServer) -> None:
    headers = [("X-API-Key", server.key), ("X-API-Key", "e2b_" + "0" * 40)]
    assert httpx.get(f"{server.url}/v2/sandboxes", headers=headers).status_code == 401


def test_the_key_works_as_bearer_too_and_lies_in_a_private_file(server: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {server.key}"}
    assert httpx.get(f"{server.url}/v2/sandboxes", headers=headers).status_code == 200
    path = server.settings.paths.state / "secrets" / "api-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "JSON"),
        (b"[]", 400, "body"),
        (b"{}", 400, "templateID"),
        (b'{"templateID": 5}', 400, "templateID"),
        (b'{"templateID": "base", "timeout": 0}', 400, "timeout"),
        (b'{"templateID": "base", "timeout": -3}', 400, "timeout"),
        (b'{"templateID": "base", "timeout": 86401}', 400, "max_timeout"),
        (b'{"templateID": "base", "timeout": "soon"}', 400, "timeout"),
        (b'{"templateID": "base", "metadata": {"a": 1}}', 400, "metadata.a"),
        (b'{"templateID": "base", "envVars": []}', 400, "envVars"),
        (b'{"templateID": "base", "autoPauseMemory": false}', 400, "needs autoPause"),
        (
            b'{"templateID": "base", "autoPause": true, "autoPauseMemory": false, "autoResume": {"enabled": true}}',
            400,
            "autoResume",
        ),
        (b'{"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}', 400, "volumeMounts"),
        (b'{"templateID": "base", "metadata": {"sandyard.lease": "x"}}', 400, "lease 'x'"),
        (b'{"templateID": "base", "metadata": {"sandyard.idle_timeout": "x"}}', 400, "idle_timeout"),
        (b'{"templateID": "bose"}', 404, "'bose' not found; did you mean base"),
    ],
)
@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
def test_bad_requests_name_what_is_wrong(
    server: LiveServer, api: httpx.Client, path: str, body: bytes, status: int, says: str
) -> None:
    reply = api.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status
    assert reply.json()["code"] == status
    assert says in reply.json()["message"]
    assert not server.runtime.instances


def test_a_create_sent_twice_with_one_key_makes_one_sandbox(server: LiveServer, api: httpx.Client) -> None:
    def send(key: str) -> httpx.Response:
        return api.post("/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": key})

    assert send("a-1").json()["sandboxID"] == send("a-1").json()["sandboxID"]
    assert send("a-2").status_code == 201
    assert len(api.get("/v2/sandboxes").json()) == 2  # the pool may have more
    assert send("Not Good").status_code == 400
    server.runtime.fail_next.append(CreateFailed("engine", "no"))
    assert send("a-3").status_code == 500
    assert send("a-3").status_code == 201


def test_a_message_quotes_what_was_sent_as_far_as_json_can(api: httpx.Client) -> None:
    half = b'{"templateID": "base", "network": {"maskRequestHost": "a \\ud800"}}'
    reply = api.post("/v2/sandboxes", content=half, headers={"content-type": "application/json"})
    assert (reply.status_code, "a ?" in reply.json()["message"]) == (400, True)
    assert len(api.get(f"/sandboxes/{'x' * 50_000}").content) < 5000


def test_a_key_of_another_create_is_refused(api: httpx.Client) -> None:
    def send(**body: object) -> httpx.Response:
        return api.post("/v2/sandboxes", json={"templateID": "base", **body}, headers={"Idempotency-Key": "a-1"})

    assert send(timeout=30).status_code == 201
    other = send(timeout=31)
    assert (other.status_code, other.json()["code"]) == (409, 409)
    assert "Idempotency-Key 'a-1' was used for another request" in other.json()["message"]
    half = b'{"templateID": "base", "mcp": {"x": "\\ud800"}}'
    kind = {"content-type": "application/json", "Idempotency-Key": "a-1"}
    assert api.post("/v2/sandboxes", content=half, headers=kind).status_code in (400, 409)
    assert len(api.get("/v2/sandboxes").json()) == 1  # the pool may have more


def test_unknown_fields_are_tolerated_and_unknown_paths_are_json(api: httpx.Client) -> None:
    create(api, brandNew={"x": 1})
    reply = api.get("/nothing/here")
    assert (reply.status_code, reply.json()["code"]) == (404, 404)
    assert api.put("/sandboxes").json()["code"] == 405


def test_what_the_runtime_cannot_do_is_said_before_acting(server: LiveServer, api: httpx.Client) -> None:
    made = create(api)
    server.runtime.capabilities = Capabilities()
    for action in ("pause", "fork", "snapshots"):
        reply = api.post(f"/sandboxes/{made['sandboxID']}/{action}", json={})
        assert reply.status_code == 400
        assert "runtime memory cannot" in reply.json()["message"]
    assert api.get(f"/sandboxes/{made['sandboxID']}").json()["state"] == "running"
    assert api.post("/sandboxes", json={"templateID": "base", "autoPause": True}).status_code == 400


def test_info_says_what_was_asked_for(api: httpx.Client) -> None:
    made = create(api, metadata={"k": "v"}, timeout=100)
    info = api.get(f"/sandboxes/{made['sandboxID']}").json()
    assert info["metadata"] == {"k": "v"}
    assert info["envdAccessToken"] == made["envdAccessToken"]
    assert info["lifecycle"] == {"autoResume": False, "onTimeout": "kill"}
    lives = datetime.fromisoformat(info["endAt"]) - datetime.fromisoformat(info["startedAt"])
    assert abs(lives.total_seconds() - 100) < 0.01


def test_v1_is_secured_only_when_asked(api: httpx.Client) -> None:
    assert create(api, "/sandboxes")["envdAccessToken"] is None
    assert create(api, "/sandboxes", secure=True)["envdAccessToken"]


@pytest.mark.parametrize("version", ["", "/v2"])
def test_connect_extends_and_never_shortens(api: httpx.Client, version: str) -> None:
    made = create(api, timeout=100)
    path = f"/sandboxes/{made['sandboxID']}"
    before = api.get(path).json()["endAt"]
    reply = api.post(f"{version}{path}/connect", json={"timeout": 10})
    assert reply.status_code == 200
    assert reply.json()["envdAccessToken"] == made["envdAccessToken"]
    assert api.get(path).json()["endAt"] == before
    api.post(f"{version}{path}/connect", json={"timeout": 500})
    assert api.get(path).json()["endAt"] > before
    assert api.post(f"{version}/sandboxes/nobody/connect", json={"timeout": 1}).status_code == 404


def test_connect_v2_needs_no_body(api: httpx.Client) -> None:
    made = create(api, timeout=5)
    assert api.post(f"/v2/sandboxes/{made['sandboxID']}/connect").status_code == 200


def test_timeout_sets_and_zero_ends_now(api: httpx.Client) -> None:
    path = f"/sandboxes/{create(api)['sandboxID']}"
    assert api.post(f"{path}/timeout", json={"timeout": 5}).status_code == 204
    left = datetime.fromisoformat(api.get(path).json()["endAt"]) - datetime.now(UTC)
    assert left.total_seconds() < 6
    assert api.post(f"{path}/timeout", json={}).status_code == 400
    assert api.post(f"{path}/refreshes", json={"duration": 4000}).status_code == 400
    assert api.post(f"{path}/refreshes", json={"duration": 50}).status_code == 204
    assert api.post(f"{path}/timeout", json={"timeout": 0}).status_code == 204
    gone = api.get(path)
    assert gone.status_code == 404
    assert gone.json()["error_code"] == "sandbox_dead_timeout"


def test_delete_is_204_then_404(api: httpx.Client) -> None:
    path = f"/sandboxes/{create(api)['sandboxID']}"
    assert api.delete(path).status_code == 204
    assert api.delete(path).status_code == 404
    assert api.get(path).headers["x-sandyard-death"] == "killed"


def test_pages_follow_each_other_though_sandboxes_die_between_them(api: httpx.Client) -> None:
    made = [create(api, metadata={"batch": "1"})["sandboxID"] for _ in range(5)]
    create(api, metadata={"batch": "2"})
    query = {"metadata": urlencode({"batch": "1"}), "limit": "2", "order": "asc"}
    first = api.get("/v2/sandboxes", params=query)
    assert [s["sandboxID"] for s in first.json()] == made[:2]
    assert first.headers["x-total-running"] == "6"
    api.delete(f"/sandboxes/{made[0]}")
    second = api.get("/v2/sandboxes", params={**query, "nextToken": first.headers["x-next-token"]})
    assert [s["sandboxID"] for s in second.json()] == made[2:4]
    third = api.get("/v2/sandboxes", params={**query, "nextToken": second.headers["x-next-token"]})
    assert [s["sandboxID"] for s in third.json()] == made[4:]
    assert "x-next-token" not in third.headers
    newest = api.get("/v2/sandboxes", params={"metadata": urlencode({"batch": "1"})}).json()
    assert [s["sandboxID"] for s in newest] == made[:0:-1]


def test_list_filters(api: httpx.Client) -> None:
    odd = {"a b": "c=d", "ü": "&%"}
    first = create(api, metadata=odd)["sandboxID"]
    time.sleep(0.01)
    second = create(api)["sandboxID"]

    def ids(**query: str) -> list[str]:
        return [s["sandboxID"] for s in api.get("/v2/sandboxes", params=query).json()]

    doubly = "&".join(f"{quote(quote(k))}={quote(quote(v))}" for k, v in odd.items())
    assert ids(metadata=doubly) == [first]
    assert ids(state="paused") == []
    assert ids(state="running,paused", template="base", order="asc") == [first, second]
    assert ids(template="other") == []
    started = api.get(f"/sandboxes/{second}").json()["startedAt"]
    assert ids(startedAfter=started) == [second]
    assert [s["sandboxID"] for s in api.get("/sandboxes").json()] == [second, first]
    for wrong in ({"limit": "0"}, {"limit": "101"}, {"order": "up"}, {"state": "dead"}, {"nextToken": "?"}):
        assert api.get("/v2/sandboxes", params=wrong).status_code == 400, wrong


def test_one_tenant_cannot_see_or_touch_another_s(server: LiveServer, api: httpx.Client) -> None:
    made = create(api, metadata={"batch": "1"})["sandboxID"]
    key = server.call(server.app_keys().issue("second"))
    with server.client(key) as other:
        assert other.get("/v2/sandboxes").json() == []
        for reply in (
            other.get(f"/sandboxes/{made}"),
            other.delete(f"/sandboxes/{made}"),
            other.post(f"/sandboxes/{made}/timeout", json={"timeout": 0}),
            other.post(f"/v2/sandboxes/{made}/connect"),
            other.get(f"/sandboxes/{made}/metrics"),
        ):
            assert reply.status_code == 404
        assert other.post("/sweep", json={"metadata": {"batch": "1"}}).json() == {"sandboxIDs": []}
        server.call(server.app_keys().revoke(key))
        assert other.get("/v2/sandboxes").status_code == 401
    assert api.get(f"/sandboxes/{made}").status_code == 200


def test_a_full_server_answers_429_with_the_reason(start_server: Callable[..., Any]) -> None:
    with start_server(max_count=1) as server, server.client() as api:
        create(api, timeout=7)
        reply = api.post("/v2/sandboxes", json={"templateID": "base"})
        assert reply.status_code == 429
        assert 1 <= int(reply.headers["retry-after"]) <= 7
        assert "all 1 places are taken" in reply.json()["message"]
        capacity = api.get("/capacity").json()
        assert capacity == {
            "maxSandboxes": 1,
            "running": 1,
            "warm": 0,
            "free": 0,
            "reasonsIfZero": ["all 1 places are taken (sandbox.max_count)"],
        }


def test_a_lease_keeps_its_sandboxes_as_long_as_it_is_renewed(api: httpx.Client) -> None:
    lease = api.post("/leases", json={"ttl": 1.0, "labels": {"run": "1"}})
    assert lease.status_code == 201
    lease_id = lease.json()["leaseID"]
    path = f"/sandboxes/{create(api, metadata={'sandyard.lease': lease_id})['sandboxID']}"
    for _ in range(4):
        time.sleep(0.4)
        assert api.post(f"/leases/{lease_id}/renew").status_code == 204
    assert api.get(path).status_code == 200
    time.sleep(1.5)
    gone = api.get(path)
    assert gone.json()["error_code"] == "sandbox_dead_lease"
    assert api.post(f"/leases/{lease_id}/renew").status_code == 404


def test_ending_a_lease_sweeps_it(server: LiveServer, api: httpx.Client) -> None:
    body = {"ttl": 60, "warm": [{"templateID": "base", "count": 3}]}
    lease_id = api.post("/leases", json=body).json()["leaseID"]
    deadline = time.monotonic() + 5
    while api.get("/capacity").json()["warm"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    create(api, metadata={"sandyard.lease": lease_id})
    assert api.delete(f"/leases/{lease_id}").status_code == 204
    assert api.delete(f"/leases/{lease_id}").status_code == 404
    assert api.get("/capacity").json()["running"] == 0
    assert api.post("/leases", json={"ttl": 0}).status_code == 400
    assert api.post("/leases", json={"ttl": 5, "warm": [{"templateID": "none", "count": 1}]}).status_code == 404


def test_sweep_tells_whom_it_killed(api: httpx.Client) -> None:
    made = create(api, metadata={"run": "1"})["sandboxID"]
    create(api)
    assert api.post("/sweep", json={"metadata": {"run": "1"}}).json() == {"sandboxIDs": [made]}
    assert api.post("/sweep", json={"metadata": {}}).status_code == 400


def test_metrics_have_a_first_sample_at_once_and_none_before_the_start(api: httpx.Client) -> None:
    path = f"/sandboxes/{create(api)['sandboxID']}/metrics"
    [sample] = api.get(path).json()
    assert sample["memTotal"] == 512 * 1024 * 1024
    assert api.get(path, params={"start": 0, "end": 1000}).json() == []
    several = api.get("/sandboxes/metrics", params={"sandbox_ids": path.split("/")[2] + ",nobody"}).json()
    assert list(several["sandboxes"]) == [path.split("/")[2]]


def test_templates(api: httpx.Client) -> None:
    [template] = api.get("/templates").json()
    assert template["names"] == ["base"]
    assert api.get("/v2/templates").json() == [template]
    assert api.get("/templates/aliases/base").json()["templateID"] == template["templateID"]
    assert api.get("/templates/aliases/none").status_code == 404


def test_the_api_describes_itself(api: httpx.Client) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    assert {"/v2/sandboxes", "/leases", "/capacity", "/sweep"} <= set(paths)


def test_an_oom_is_attributed_on_both_planes(server: LiveServer, api: httpx.Client) -> None:
    made = create(api)["sandboxID"]
    server.call(server.runtime.instances[made].die(DeathReason.OOM, "512 MiB"))
    deadline = time.monotonic() + 5
    while (reply := api.get(f"/sandboxes/{made}")).status_code == 200:
        assert time.monotonic() < deadline
    assert reply.json()["error_code"] == "sandbox_dead_oom"
    assert "512 MiB" in reply.json()["message"]
    health = api.get("/health", headers={"E2b-Sandbox-Id": made})
    assert health.status_code == 502
    assert health.headers["x-sandyard-death"] == "oom"
    assert health.json() == {
        "code": 502,
        "message": "The sandbox was not found",
        "sandboxId": made,
        "reason": "oom",
        "detail": "512 MiB",
    }


def test_a_full_disk_refuses_creates_and_lets_sandboxes_die(
    server: LiveServer, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(api)["sandboxID"]

    async def full(_record: object) -> None:
        raise HostError("database x: database or disk is full")

    monkeypatch.setattr(server.app.manager.store, "add_sandbox", full)
    monkeypatch.setattr(server.app.manager.store, "bury", full)
    refused = api.post("/v2/sandboxes", json={"templateID": "base"})
    assert (refused.status_code, refused.json()["message"]) == (500, "database x: database or disk is full")
    assert api.delete(f"/sandboxes/{made}").status_code == 204
    assert api.get(f"/sandboxes/{made}").json()["error_code"] == "sandbox_dead_killed"
    assert not server.runtime.instances
    monkeypatch.undo()
    create(api)
