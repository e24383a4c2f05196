"""The command line over a live server: output, exit status, and what a newcomer's mistakes are answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.server.conftest import LiveServer


def start(run: Run, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert run("start", "base", "-d", *options) == 0
    return capsys.readouterr().out.strip()


def test_start_exec_list_delete(server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox_id = start(run, capsys, "-l", "who=me", "-e", "A=b")
    assert run("exec", sandbox_id, "--", "echo", "hi there") == 0
    assert capsys.readouterr().out == "hi there\n"
    assert run("list", "--label", "who=me") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["id"], row["state"], row["labels"]) == (sandbox_id, "running", {"who": "me"})
    assert run("ls", "--output", "table") == 0
    assert sandbox_id in capsys.readouterr().out
    assert run("sandbox", "delete", sandbox_id) == 0
    assert run("delete", sandbox_id) == 2
    assert f"no such sandbox: {sandbox_id}" in capsys.readouterr().err


def test_exec_gives_the_commands_own_exit_code(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sandbox_id = start(run, capsys)
    assert run("exec", sandbox_id, "fail 7") == 7
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("part\n", "wrong\n")


def test_sweep_ends_what_carries_the_labels(server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    mine = start(run, capsys, "-l", "run=1")
    other = start(run, capsys, "-l", "run=2")
    assert run("sweep", "-l", "run=1") == 0
    assert capsys.readouterr().out.split() == [mine]
    assert run("list") == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [other]


def test_auth_tries_the_key_and_stores_it_privately(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("auth", "--url", server.url, "--api-key", "e2b_" + "0" * 40) == 2
    assert "refuses this key" in capsys.readouterr().err
    assert run("auth", "--url", server.url, "--api-key", server.key) == 0
    stored = tmp_path / "config" / "sandyard" / "credentials"
    assert stored.stat().st_mode & 0o777 == 0o600
    assert server.key not in capsys.readouterr().out
    for name in server.environment:
        monkeypatch.delenv(name)
    assert run("template", "list") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "base"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["start", "bse", "-d"], 1, "did you mean base?"),
        (["start", "base", "-d", "--timeout", "0"], 1, "timeout"),
        (["start", "base", "-d", "-e", "novalue"], 2, "--env 'novalue' is not NAME=VALUE"),
        (["start", "base"], 2, "not a terminal"),
        (["exec", "nosuch", "true"], 2, "no such sandbox: nosuch; `sandyard list`"),
        (["exec"], 2, "Missing argument"),
        (["train", "nosuch"], 2, "no recipe.py in nosuch"),
        (["train", "recipes/code_rl", "--set", "nosuch=1"], 2, "not NAME=VALUE of"),
        (["train", "recipes/code_rl", "--set", "eval_samples=many"], 2, "not a int"),
        (["eval", "nosuch.jsonl"], 1, "nosuch.jsonl"),
        (["nosuch"], 2, "No such command 'nosuch'"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert run(*arguments) == status
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_wrong_key_and_a_missing_server_say_what_to_do(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "0" * 40)
    assert run("list") == 1
    assert "401" in capsys.readouterr().err
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    assert run("template", "list") == 1
    assert "start one with `sandyard serve`" in capsys.readouterr().err


def test_help_names_every_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in (
        *("setup", "serve", "doctor", "auth", "start", "exec", "connect", "list", "delete", "template", "train"),
        *("conformance", "eval", "sweep"),
    ):
        assert f"  {command} " in text, command
