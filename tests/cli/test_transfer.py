"""Upload and download over real containers: modes, symlinks and holes, there and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from sandyard.config import Settings
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from tests.cli.conftest import Run
from tests.cli.test_archive import check, tree
from tests.yard import node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

MIB = 1 << 20


@pytest.fixture
async def base_template() -> None:
    """Built on first use, which takes a minute or two."""
    await build_base(Settings())


@pytest.fixture
def box(base_template: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    with node_home() as home, EmbeddedServer(node_settings(home)) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield Sandbox.create("base", timeout=200)


def test_a_tree_there_and_back(box: Sandbox, run: Run, tmp_path: Path) -> None:
    tree(tmp_path / "a")
    assert run("upload", box.sandbox_id, str(tmp_path / "a"), "/tmp/copy") == 0
    shown = box.commands.run("cd /tmp/copy && stat -c '%a %U' run && readlink near dangling && du -k sparse | cut -f1")
    assert shown.stdout.split()[:4] == ["751", "user", "run", "/no/such/file"]
    assert int(shown.stdout.split()[4]) < 1024
    assert run("download", box.sandbox_id, "/tmp/copy", str(tmp_path / "b")) == 0
    check(tmp_path / "b")
    assert box.commands.run("ls -A /tmp | grep sandyard || true").stdout == ""


def test_one_file_keeps_its_mode_and_its_holes(
    box: Sandbox, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = os.urandom(3 * MIB)
    (tmp_path / "tool").write_bytes(data)
    (tmp_path / "tool").chmod(0o750)
    assert run("upload", box.sandbox_id, str(tmp_path / "tool"), "bin/") == 0
    assert box.commands.run("stat -c '%a %s' bin/tool").stdout == f"750 {len(data)}\n"
    assert run("download", box.sandbox_id, "bin/tool", str(tmp_path / "back")) == 0
    assert (tmp_path / "back").read_bytes() == data
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o750

    box.commands.run("truncate -s 64M /tmp/big && echo end >> /tmp/big && ln -s big /tmp/link")
    assert run("download", box.sandbox_id, "/tmp/big", str(tmp_path)) == 0
    assert (tmp_path / "big").stat().st_size == 64 * MIB + 4
    assert (tmp_path / "big").stat().st_blocks * 512 < MIB
    assert run("download", box.sandbox_id, "/tmp/link", str(tmp_path)) == 0
    assert os.readlink(tmp_path / "link") == "big"

    assert run("download", box.sandbox_id, "bin/tool", str(tmp_path / "back")) == 2
    assert "back exists; --force replaces it" in capsys.readouterr().err
    (tmp_path / "back").write_text("old")
    assert run("download", box.sandbox_id, "bin/tool", str(tmp_path / "back"), "--force") == 0
    assert (tmp_path / "back").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "big", "link", "tool"]


def test_what_cannot_be_copied_is_said(
    box: Sandbox, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f").write_text("x")
    for arguments, status, said in (
        (["upload", box.sandbox_id, str(tmp_path / "nosuch"), "/tmp/x"], 2, "no such file here"),
        (["upload", "nosuch", str(tmp_path / "f"), "/tmp/x"], 2, "no such sandbox: nosuch"),
        (["upload", box.sandbox_id, str(tmp_path / "f"), "/proc/x"], 1, "/proc/x"),
        (["download", box.sandbox_id, "/nosuch", str(tmp_path)], 2, "no such file in sandbox"),
    ):
        assert run(*arguments) == status, arguments
        printed = capsys.readouterr()
        assert said in printed.err
        assert "Traceback" not in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
