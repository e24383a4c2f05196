"""Pause, resume, fork, snapshot and logs from the command line: output, exit status, mistakes."""

from __future__ import annotations

import json

import pytest

from sandyard.cli.logs import _Tail
from tests.cli.conftest import Run
from tests.server.conftest import LiveServer

Captured = pytest.CaptureFixture[str]


def start(run: Run, capsys: Captured, *options: str) -> str:
    assert run("start", "base", "-d", *options) == 0
    return capsys.readouterr().out.strip()


def rows(capsys: Captured) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return found


def test_pause_and_resume(server: LiveServer, run: Run, capsys: Captured) -> None:
    made = start(run, capsys)
    assert run("pause", made) == 0
    assert run("list") == 0
    assert [row["state"] for row in rows(capsys)] == ["paused"]
    assert run("pause", made) == 2
    assert "paused" in capsys.readouterr().err
    assert run("resume", made, "--timeout", "60") == 0
    assert capsys.readouterr().err == ""
    assert run("resume", made) == 0
    assert "was running" in capsys.readouterr().err
    assert run("sandbox", "pause", made, "--files-only") == 0
    assert run("resume", made) == 0
    assert run("exec", made, "--", "echo", "alive") == 0
    assert capsys.readouterr().out == "alive\n"


def test_fork_a_sandbox_and_a_snapshot(server: LiveServer, run: Run, capsys: Captured) -> None:
    made = start(run, capsys)
    assert run("fork", made, "--count", "2") == 0
    children = rows(capsys)
    assert len({row["id"] for row in children} | {made}) == 3
    assert run("snapshot", "create", made, "--name", "kept") == 0
    snapshot = capsys.readouterr().out.strip()
    assert run("snap", "list") == 0
    assert [row["id"] for row in rows(capsys)] == [snapshot]
    assert run("snapshot", "list", "--sandbox-id", "other") == 0
    assert rows(capsys) == []
    assert run("fork", "kept", "-n", "2") == 0
    assert len(rows(capsys)) == 2
    assert run("list") == 0
    for row in rows(capsys):
        assert run("delete", row["id"]) == 0
    assert run("snapshot", "delete", snapshot) == 0
    assert run("snapshot", "list") == 0
    assert rows(capsys) == []


def test_logs_are_lines_for_people_and_json_for_programs(server: LiveServer, run: Run, capsys: Captured) -> None:
    made = start(run, capsys)
    assert run("exec", made, "--", "echo", "hi") == 0
    capsys.readouterr()
    assert run("logs", made) == 0
    told = [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "created from template base"
    assert any(message.startswith("process started: ") for message in told)
    assert run("logs", made, "--output", "table", "--search", "created", "-n", "1") == 0
    assert " info  created from template base" in capsys.readouterr().out
    assert run("delete", made) == 0
    assert run("logs", made, "--follow") == 0  # it ends by itself: nothing more will come
    assert "killed by its owner" in capsys.readouterr().out


def test_a_cold_start_has_a_size(server: LiveServer, run: Run, capsys: Captured) -> None:
    assert run("start", "-d", "--cold", "base", "--memory", "256", "--cpu", "2") == 0
    made = capsys.readouterr().out.strip()
    with server.client() as api:
        info = api.get(f"/sandboxes/{made}").json()
    assert (info["memoryMB"], info["cpuCount"]) == (256, 2)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["pause", "nosuch"], 2, "sandbox 'nosuch' not found; `sandyard list` shows what lives"),
        (["resume", "nosuch"], 2, "sandbox 'nosuch' not found"),
        (["fork", "nosuch"], 2, "template 'nosuch' not found"),
        (["fork", "base", "--count", "0"], 2, "--count"),
        (["timeout", "nosuch", "5"], 2, "`sandyard list` shows what lives"),
        (["logs", "nosuch"], 2, "sandbox 'nosuch' not found"),
        (["logs", "nosuch", "--level", "loud"], 2, "--level"),
        (["snapshot", "create", "nosuch"], 2, "sandbox 'nosuch' not found"),
        (["snapshot", "delete", "nosuch"], 2, "nosuch"),
        (["start", "-d", "--cold", "nosuch:1"], 2, "nosuch:1"),
        (["start", "-d", "--memory", "256"], 2, "go with --cold"),
        (["start", "-d", "--cold", "base", "--disk-size-mb", "1500"], 2, "diskSizeMB: "),
    ],
)
def test_mistakes_are_answered_in_one_line(
    server: LiveServer, run: Run, capsys: Captured, arguments: list[str], status: int, said: str
) -> None:
    assert run(*arguments) == status
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_following_tells_each_line_once() -> None:
    def entry(milliseconds: int, message: str) -> dict[str, object]:
        return {"timestamp": f"2026-01-01T00:00:00.{milliseconds:03}000+00:00", "message": message}

    first, second, third = entry(1, "a"), entry(2, "b"), entry(2, "c")
    tail = _Tail()
    assert tail.fresh([first, second]) == [first, second]
    assert tail.fresh([second]) == []
    assert tail.fresh([second, third]) == [third]
    assert tail.fresh([second, third]) == []
