"""Logs of sandboxes: what is told, in which order, to whom, and that it stays bounded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest

from sandyard.errors import DeathReason
from sandyard.sandboxes.log import DEAD_BYTES, LINE_BYTES, LINES, TOTAL_BYTES, DeadLogs, Level, SandboxLog
from sandyard.server.envd.connect import frame
from tests.server.conftest import LiveServer
from tests.server.test_data_plane import Box


def run(box: Box, *argv: str) -> None:
    body = {"process": {"cmd": argv[0], "args": argv[1:], "envs": {"SECRET": "hunter2"}}, "stdin": False}
    reply = box.http.post(
        "/process.Process/Start",
        content=frame(json.dumps(body).encode()),
        headers={"content-type": "application/connect+json"},
    )
    assert b'"end"' in reply.content


@pytest.fixture
def box(server: LiveServer, api: httpx.Client) -> Iterator[Box]:
    made = Box(server, api)
    yield made
    made.close()


def messages(api: httpx.Client, sandbox_id: str, **params: str | int) -> list[str]:
    reply = api.get(f"/v2/sandboxes/{sandbox_id}/logs", params=params)
    assert reply.status_code == 200, reply.text
    return [entry["message"] for entry in reply.json()["logs"]]


def test_a_life_and_its_processes_are_told_without_the_environment(api: httpx.Client, box: Box) -> None:
    run(box, "echo", "two words")
    run(box, "false")
    told = messages(api, box.id)
    assert told[0] == "created from template base"
    assert "process started: echo 'two words'" in told
    assert told[-1] == "process ended: exit code 1"
    assert api.delete(f"/sandboxes/{box.id}").status_code == 204
    reply = api.get(f"/v2/sandboxes/{box.id}/logs")
    assert "hunter2" not in reply.text
    last = reply.json()["logs"][-1]
    assert (last["fields"], last["level"]) == ({"reason": "killed"}, "info")


def test_pages_levels_and_searches(api: httpx.Client, box: Box) -> None:
    run(box, "false")
    everything = api.get(f"/v2/sandboxes/{box.id}/logs").json()["logs"]
    assert [entry["level"] for entry in everything] == ["info", "info", "warn"]
    assert messages(api, box.id, level="warn") == ["process ended: exit code 1"]
    assert messages(api, box.id, search="started: fal") == ["process started: false"]
    assert messages(api, box.id, direction="backward", limit=1) == ["process ended: exit code 1"]
    assert messages(api, box.id, limit=0) == []
    later = int(time.time() * 1000) + 60_000
    assert messages(api, box.id, cursor=later) == []
    assert len(messages(api, box.id, cursor=later, direction="backward")) == 3
    assert len(messages(api, box.id, cursor=0)) == 3
    assert messages(api, box.id, cursor=0, direction="backward") == []


def test_the_first_generation_has_lines_and_entries(api: httpx.Client, box: Box) -> None:
    reply = api.get(f"/sandboxes/{box.id}/logs", params={"limit": 1}).json()
    assert [line["line"] for line in reply["logs"]] == ["created from template base"]
    assert reply["logEntries"][0]["fields"]["start"] == "cold"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "1001"),
        ("limit", "-1"),
        ("cursor", "-1"),
        ("direction", "up"),
        ("level", "loud"),
        ("search", "a" * 257),
    ],
)
def test_wrong_parameters_are_named(api: httpx.Client, box: Box, name: str, value: str) -> None:
    reply = api.get(f"/v2/sandboxes/{box.id}/logs", params={name: value})
    assert reply.status_code == 400
    assert reply.json()["message"].startswith(f"{name}: ")


def test_another_tenant_reads_nothing(server: LiveServer, api: httpx.Client, box: Box) -> None:
    key = server.call(server.app_keys().issue("other"))
    with server.client(key) as other:
        for path in (f"/v2/sandboxes/{box.id}/logs", f"/sandboxes/{box.id}/logs"):
            assert other.get(path).status_code == 404
        server.call(server.runtime.instances[box.id].die(DeathReason.OOM, "512 MiB"))
        deadline = time.monotonic() + 5
        while "oom" not in messages(api, box.id)[-1]:
            assert time.monotonic() < deadline
        assert other.get(f"/v2/sandboxes/{box.id}/logs").status_code == 404
    assert messages(api, box.id, level="error") == [f"sandbox {box.id} died: oom (512 MiB)"]


def test_a_log_is_bounded_in_lines_and_bytes() -> None:
    log = SandboxLog()
    for number in range(2 * LINES):
        log.append(str(number))
    kept = log.read()
    assert (len(kept), kept[0].message) == (LINES, str(LINES))
    for _ in range(2 * TOTAL_BYTES // LINE_BYTES):
        log.append("x" * 10 * LINE_BYTES, Level.ERROR, field="y" * LINE_BYTES)
    assert log.size <= TOTAL_BYTES
    assert all(len(entry.message) <= LINE_BYTES for entry in log.read())


def test_half_a_surrogate_pair_can_be_told() -> None:
    log = SandboxLog()
    log.append("a\ud800b", name="\udfff")
    [entry] = log.read()
    assert (entry.message, entry.fields) == ("a?b", {"name": "?"})


def test_time_never_runs_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SandboxLog()
    log.append("first")
    monkeypatch.setattr(time, "time", lambda: 1.0)
    log.append("second")
    first, second = log.read()
    assert second.at == first.at


def test_logs_of_the_dead_are_bounded_together() -> None:
    dead, log = DeadLogs(), SandboxLog()
    while log.size < TOTAL_BYTES - 2 * LINE_BYTES:
        log.append("x" * LINE_BYTES)
    fits = DEAD_BYTES // log.size
    for number in range(fits + 5):
        dead.keep(str(number), "me", log)
    assert [dead.get("me", str(number)) for number in range(5)] == [None] * 5
    assert dead.get("me", "5") is log
    assert dead.get("you", "5") is None
