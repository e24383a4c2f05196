"""`sandyard template` over a live server."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.cli.conftest import Run
from tests.server.conftest import LiveServer
from tests.server.test_templates import begin, register


def test_a_build_is_watched_tagged_and_deleted(
    server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key}) as api:
        made = register(api, "mine:v1")
        begin(api, made, steps=[{"type": "RUN", "args": ["echo hello"]}])
    assert run("template", "watch", "mine") == 0
    shown = capsys.readouterr().out
    assert "RUN echo hello" in shown
    assert "\nhello\n" in shown
    assert run("template", "tag", "mine:v1", "stable", "old") == 0
    assert capsys.readouterr().out.strip() == made["buildID"]
    assert run("template", "untag", "mine", "old") == 0
    assert run("template", "show", "mine") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["build"], row["status"], row["tags"]) == (made["buildID"], "ready", "stable, v1")
    assert run("templates", "list") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["mine", "base"]
    assert run("template", "delete", "mine") == 0
    assert run("template", "rm", "mine") == 2
    assert "template 'mine' not found" in capsys.readouterr().err


def test_a_failed_build_fails_the_watch(server: LiveServer, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key}) as api:
        made = register(api, "mine")
        begin(api, made, steps=[{"type": "RUN", "args": ["fail 3"]}])
    assert run("template", "watch", "mine", "--build", made["buildID"], "-v") == 1
    assert "failed at step 1: failed to run command 'fail 3': exit status 3" in capsys.readouterr().err
