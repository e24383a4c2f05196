"""The build hook: compiles what changed, says what is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of one small program, named as the agent is."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "guest/main.c").write_text(
        '#include "h.h"\n#include <stdio.h>\nint main(void) { return puts(TEXT) < 0; }\n'
    )
    (tmp_path / "guest/h.h").write_text('#define TEXT "one"\n')
    return tmp_path


def test_compiles_once_and_again_when_a_header_changes(hook: ModuleType, tree: Path) -> None:
    binary = tree / "src/sandyard/guest/bin/sandyard-agent"
    assert hook.build(tree) == [binary]
    assert subprocess.run([binary], capture_output=True, check=True).stdout == b"one\n"
    assert hook.build(tree) == []
    (tree / "guest/h.h").write_text('#define TEXT "two"\n')
    assert hook.build(tree) == [binary]
    assert subprocess.run([binary], capture_output=True, check=True).stdout == b"two\n"
    binary.unlink()
    assert hook.build(tree) == [binary]


def test_the_next_compiler_is_tried(hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler --flag")
    assert len(hook.build(tree)) == 1


def test_nothing_works(hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(hook.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="install gcc, or `pip install ziglang`, or set CC"):
        hook.build(tree)
    assert [path.name for path in (tree / "src/sandyard/guest/bin").iterdir()] == []
    (tree / "guest/main.c").write_text("no C at all\n")
    monkeypatch.setenv("CC", shutil.which("cc", path=os.defpath) or "cc")
    with pytest.raises(SystemExit, match="cannot compile sandyard-agent"):
        hook.build(tree)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_agent_builds_with_zig_for_both_machines(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    for machine in ("x86_64", "aarch64"):
        target = tmp_path / machine
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            f"{machine}-linux-musl",
            "-std=c11",
            "-D_GNU_SOURCE",
        ]
        flags = ["-O2", "-static", "-s", "-Wall", "-Wextra", "-Werror", "-o", str(target)]
        subprocess.run([*command, *flags, *map(str, sorted((REPOSITORY / "guest").glob("*.c")))], check=True)
        assert target.read_bytes()[:4] == b"\x7fELF"
