"""Layers kept as differences: killed, damaged, deep and shared."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from sandyard.errors import SandboxError
from sandyard.runtimes.container.increment import (
    MAX_DEPTH,
    TooMuch,
    commit_increment,
    delta_of,
    forget,
    parent_of,
    ready,
)

SIZE = 16 << 20
_COMMIT = """
import sys
from contextlib import nullcontext
from pathlib import Path
from sandyard.runtimes.container.increment import commit_increment, ready
image, target, parent = map(Path, sys.argv[1:])
print("go", flush=True)
for number in range(1000):
    commit_increment(image, target.with_name(f"{target.name}{number}"), parent, nullcontext, lambda: 0, True)
    ready([target.with_name(f"{target.name}{number}")])
"""


def _commit(image: Path, target: Path, parent: Path) -> int:
    return commit_increment(image, target, parent, nullcontext, lambda: 0, False)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An image, and `root`, its copy from before a change."""
    content = bytearray(random.Random(7).randbytes(SIZE))
    (tmp_path / "root").write_bytes(content)
    content[1 << 20 : 3 << 20] = random.Random(8).randbytes(2 << 20)
    (tmp_path / "disk.img").write_bytes(content)
    return tmp_path / "disk.img"


def _change(disk: Path, number: int) -> bytes:
    with open(disk, "r+b") as file:
        os.pwrite(file.fileno(), f"change {number}".encode() * 100, number * 70_000)
    return disk.read_bytes()


def test_killed_at_any_point_there_is_the_old_or_the_new_and_the_next_try_succeeds(disk: Path) -> None:
    rng, home = random.Random(3), disk.parent
    wanted = disk.read_bytes()
    for attempt in range(12):
        command = [sys.executable, "-c", _COMMIT, str(disk), str(home / f"k{attempt}-"), str(home / "root")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        time.sleep(rng.random() * 0.3)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        layers = {path.with_name(path.name.partition(".")[0]) for path in home.glob(f"k{attempt}-*")}
        for layer in layers:
            if delta_of(layer).exists():  # whole, whatever was killed
                assert parent_of(layer) == home / "root"
            else:  # nothing of it may be taken for a layer
                assert not layer.exists()
                _commit(disk, layer, home / "root")
            ready([layer])
            assert layer.read_bytes() == wanted
        for path in home.glob(f"k{attempt}-*"):
            path.unlink()


def test_a_chain_is_bounded_and_every_link_is_its_own_state(disk: Path) -> None:
    home, parent, states = disk.parent, disk.parent / "root", {}
    for number in range(3 * MAX_DEPTH):
        states[home / f"c{number}"] = _change(disk, number)
        _commit(disk, home / f"c{number}", parent)
        parent = home / f"c{number}"
    for layer, content in states.items():
        depth, below = 0, parent_of(layer)
        while below is not None:
            depth, below = depth + 1, parent_of(below)
        assert depth <= MAX_DEPTH
        ready([layer])
        assert layer.read_bytes() == content
        layer.unlink()


def test_what_changed_while_it_was_read_is_in_it(disk: Path) -> None:
    looks = iter(range(10))

    def written() -> int:
        _change(disk, 50 + (look := next(looks)))  # somebody writes between any two looks
        return look

    _, target = commit_increment(disk, disk.parent / "one", disk.parent / "root", nullcontext, written, True), disk
    ready([disk.parent / "one"])
    assert (disk.parent / "one").read_bytes() == target.read_bytes()


def test_much_change_is_better_kept_whole(disk: Path) -> None:
    disk.write_bytes(random.Random(9).randbytes(SIZE))
    with pytest.raises(TooMuch):
        _commit(disk, disk.parent / "one", disk.parent / "root")
    assert sorted(path.name for path in disk.parent.iterdir()) == ["disk.img", "root"]


def test_damage_is_refused_and_leaves_nothing(disk: Path) -> None:
    one = disk.parent / "one"
    _commit(disk, one, disk.parent / "root")
    delta = delta_of(one)
    whole = delta.read_bytes()
    for at in (5000, len(whole) // 2, len(whole) - 300, len(whole) - 20):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        delta.chmod(0o600)
        delta.write_bytes(damaged)
        with pytest.raises(SandboxError, match=str(delta)):
            ready([one])
        assert not one.exists()
    delta.write_bytes(whole)
    (disk.parent / "root").rename(disk.parent / "elsewhere")
    with pytest.raises(SandboxError, match="root is gone"):
        ready([one])
    (disk.parent / "elsewhere").rename(disk.parent / "root")
    ready([one])
    assert one.read_bytes() == disk.read_bytes()


def test_an_image_that_nobody_wanted_lately_goes_and_comes_again(disk: Path) -> None:
    one = disk.parent / "one"
    _commit(disk, one, disk.parent / "root")
    ready([one])
    assert not forget(one)
    os.utime(one, (0, 0))
    assert forget(one)
    assert not one.exists()
    assert not forget(disk.parent / "root")  # it has nothing to be made from
    ready([one, disk.parent / "root"])
    assert one.read_bytes() == disk.read_bytes()


def test_no_room_leaves_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        commit_increment(disk, disk.parent / "one", disk.parent / "root", nullcontext, lambda: 0, True)
    assert sorted(path.name for path in disk.parent.iterdir()) == ["disk.img", "root"]
