"""What a VMM that was broken into may leave in its own directory, or say without end."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from sandyard.errors import SandboxError
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.launch import _LOG_MAX, _bounded, last_lines
from sandyard.runtimes.microvm.record import forget_halted, load_halted, save_halted
from tests.yard import needs_qemu


@pytest.fixture
def own(tmp_path: Path) -> Path:
    home = tmp_path / "disks" / "box"
    home.mkdir(parents=True)
    return home


@needs_qemu
def test_a_link_under_the_name_of_the_next_image_is_not_followed(own: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of the host")
    (own / "blank.img").write_bytes(bytes(1 << 20))
    (own / "disk0.qcow2").symlink_to(victim)
    made = disk.above(own, "blank.img", "raw", 1 << 20, 0)
    assert victim.read_bytes() == b"of the host"
    assert not made.is_symlink()
    assert made.read_bytes()[:4] == b"QFI\xfb"
    assert [path.name for path in own.parent.iterdir()] == ["box"]


def test_what_a_tool_left_is_taken_only_if_it_is_a_file(own: Path, tmp_path: Path) -> None:
    os.mkfifo(own / "layer-1")
    with pytest.raises(SandboxError, match="not a file"):
        disk.take(own / "layer-1", tmp_path / "layer", durable=False)
    assert not (tmp_path / "layer").exists()


def test_that_a_sandbox_is_halted_is_not_for_its_vmm_to_say(own: Path) -> None:
    os.mkfifo(own / "halted.json")
    assert load_halted(own) is None
    save_halted(own, SandboxSpec("box", Rootfs(layers=[])))
    found = load_halted(own)
    assert found is not None
    assert found.sandbox_id == "box"
    assert [path.name for path in own.iterdir()] == ["halted.json"]
    forget_halted(own)
    assert load_halted(own) is None


def test_what_a_vmm_says_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _bounded(log) as out:
        talking = "import signal, os; signal.signal(signal.SIGPIPE, signal.SIG_IGN)\n"
        talking += "try:\n for _ in range(40): os.write(2, b'x' * (1 << 17))\nexcept BrokenPipeError: pass"
        done = subprocess.run(["python3", "-c", talking], stderr=out, check=False)
    assert done.returncode == 0
    deadline = time.monotonic() + 10
    while log.stat().st_size < _LOG_MAX:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert log.stat().st_size == _LOG_MAX


def test_the_last_words_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _bounded(log) as out:
        subprocess.run(["sh", "-c", "echo one >&2; echo two >&2"], stderr=out, check=True)
    assert last_lines(log) == "one | two"
