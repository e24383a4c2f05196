"""The command line over a live server: output, exit status, and what a newcomer's mistakes are answered with."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.cli.setup import SetupLines
from sandyard.config import Settings
from sandyard.doctor import Finding
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


def test_a_sandbox_that_is_not_there_is_to_be_looked_for_and_a_snapshot_is_not_among_them(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pause", "nosuch") == 2
    assert "; `sandyard list` shows what lives\n" in capsys.readouterr().err
    assert run("logs", "nosuch") == 2
    assert "; `sandyard list` shows what lives\n" in capsys.readouterr().err
    assert run("snapshot", "delete", "nosuch") == 2
    said = capsys.readouterr().err
    assert "there are: base" in said
    assert "list" not in said


def test_the_first_program_of_the_readme(server: LiveServer) -> None:
    text = Path("README.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    key = server.settings.paths.state / "secrets" / "api-key"
    for ours, theirs in (("/var/lib/sandyard/secrets/api-key", str(key)), ("http://127.0.0.1:8000", server.url)):
        assert ours in program
        program = program.replace(ours, theirs)
    program = program.replace("python3 -c 'print(6*7)'", "echo 42")  # what the runtime in memory can do
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("42", "", 0)


def test_what_is_not_for_this_user_to_read_is_said_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: object) -> None:
        raise PermissionError(13, "Permission denied", "/state/templates")

    monkeypatch.setattr("sandyard.sandboxes.storage.usage.usage", refuse)
    assert run("store", "df") == 1
    printed = capsys.readouterr()
    assert "Permission denied: '/state/templates'; run as root" in printed.err
    assert (len(printed.err.splitlines()), printed.out) == (1, "")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "/state/x: No space left on device; free space"),
        (errno.EROFS, "/state/x: Read-only file system; set"),
    ],
)
def test_a_disk_that_takes_nothing_is_said_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def fail(settings: object) -> None:
        raise OSError(number, os.strerror(number), "/state/x")

    monkeypatch.setattr("sandyard.server.serve.run_server", fail)
    assert run("serve") == 1
    assert said in capsys.readouterr().err
    number = errno.EBADF
    with pytest.raises(OSError, match="Bad file"):
        run("serve")


def test_the_doctor_tells_each_thing_as_it_is_found_in_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = f"run: apt-get install {'package ' * 20}end"
    seen = []

    async def diagnose(settings: Settings) -> AsyncIterator[Finding]:
        yield Finding("packages", False, settings.sandbox.runtime, remedy)
        seen.append(capsys.readouterr().out)
        yield Finding("microVM", True, "boots", "guests run in software")

    monkeypatch.setattr("sandyard.doctor.diagnose", diagnose)
    assert run("doctor", "--runtime", "microvm") == 1
    assert [line.split() for line in seen[0].splitlines()] == [
        ["FAIL", "packages", "microvm"],
        ["remedy:", *remedy.split()],
    ]
    assert "     note: guests run in software\n1 ok, 1 to mend\n" in capsys.readouterr().out


def test_a_line_of_setup_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    SetupLines()("runtime", 1.0, "word " * 40 + "end")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_help_names_every_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for command in (
        *("setup", "serve", "doctor", "auth", "start", "exec", "connect", "list", "delete", "template", "train"),
        *("conformance", "eval", "sweep"),
    ):
        assert f"  {command} " in text, command
