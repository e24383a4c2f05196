"""`sandyard build` over a live server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Run
from tests.server.conftest import LiveServer


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "Dockerfile").write_text(
        'FROM base\nARG WHO=world\nCOPY app.txt /opt/\nRUN echo hello $WHO\nCMD ["echo"]\n'
    )
    (tmp_path / "app.txt").write_text("app")
    (tmp_path / "large").write_text("never sent")
    return tmp_path


def test_a_dockerfile_becomes_a_template(
    server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", str(app), "-t", "mine:v1", "--memory", "300", "--disk", "700", "--cpu", "2") == 0
    shown = capsys.readouterr()
    assert "[2/4] COPY app.txt /opt/" in shown.out
    assert "[3/4] RUN echo hello $WHO" in shown.out
    assert "1 files" in shown.err
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key}) as api:
        (build,) = api.get("/templates/mine").json()["builds"]
    assert (build["cpuCount"], build["memoryMB"], build["diskSizeMB"]) == (2, 300, 700)


def test_a_name_that_is_taken_is_moved_on_purpose_only(
    server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", str(app), "-t", "mine") == 0
    assert run("build", str(app), "-t", "mine") == 2
    assert "'mine' already points to a build of template" in capsys.readouterr().err
    assert run("build", str(app), "-t", "mine:other") == 0
    capsys.readouterr()
    assert run("build", str(app), "-t", "mine", "--rebuild") == 0
    assert "CACHED [3/4] RUN echo hello $WHO" in capsys.readouterr().out
    assert run("build", str(app), "-t", "mine", "--rebuild", "--no-cache") == 0
    assert "CACHED" not in capsys.readouterr().out
    assert run("template", "show", "mine") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["tags"] for row in rows] == ["default", "", "other", ""]


def test_a_failure_names_its_line_and_ends_in_one(
    server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (app / "Dockerfile").write_text("FROM base\n\nRUN fail 3\n")
    assert run("build", str(app), "-t", "mine") == 1
    assert "failed at step 1: Dockerfile:3: RUN fail 3: exit status 3" in capsys.readouterr().err
    assert run("template", "watch", "mine") == 1  # the log is kept


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("FROM base\nNOPE\n", [], "Dockerfile:2: unknown instruction: NOPE"),
        ("FROM base\nCOPY gone /x\n", [], "Dockerfile:2: 'gone' is not there in the build context"),
        ("FROM base\n", ["--target", "run"], "target 'run' is no stage"),
        ("FROM base\n", ["--build-arg", "A"], "write NAME=VALUE"),
        ("FROM base\n", ["-f", "/no/such"], "/no/such cannot be read"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything(
    server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str],
    text: str, options: list[str], words: str,
) -> None:  # fmt: skip
    (app / "Dockerfile").write_text(text)
    assert run("build", str(app), "-t", "mine", *options) == 2
    assert words in capsys.readouterr().err
    assert run("template", "show", "mine") == 2


def test_other_files_and_values(server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (app / "other").write_text("ARG B=none\nFROM ${B} AS one\nRUN echo $X\nFROM nowhere AS two\n")
    options = ["-f", str(app / "other"), "--target", "one", "--build-arg", "B=base", "--build-arg", "UNUSED=1"]
    assert run("build", str(app), "-t", "mine", *options) == 0
    assert "no ARG declares the build argument UNUSED" in capsys.readouterr().out
    assert run("build", str(app), "-t", "later", "-f", str(app / "other"), "--target", "one", "-d",
               "--build-arg", "B=base") == 0  # fmt: skip
    assert run("template", "watch", "later") == 0


def test_a_name_is_needed(server: LiveServer, run: Run, app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("build", str(app)) == 2
    assert "-t NAME[:TAG]" in capsys.readouterr().err
