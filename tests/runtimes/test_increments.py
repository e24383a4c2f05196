"""Layers kept as differences: killed, damaged, deep and shared."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from sandyard.errors import SandboxError
from sandyard.runtimes.container.commit import commit
from sandyard.runtimes.container.derived import MAX_DEPTH, delta_of, forget, parent_of, ready
from sandyard.runtimes.container.increment import TooMuch, commit_increment
from sandyard.runtimes.container.merging import merge

SIZE = 16 << 20
_COMMIT = """
import sys
from contextlib import nullcontext
from pathlib import Path
from sandyard.runtimes.container.derived import ready
from sandyard.runtimes.container.increment import commit_increment
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


@pytest.mark.root
def test_a_full_disk_is_said_and_leaves_nothing_half(disk: Path) -> None:
    """A real one: the file system of the layers has room for a part of the delta."""
    layers = disk.parent / "layers"
    layers.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=17m", "tmpfs", str(layers)], check=True)
    try:
        (layers / "root").write_bytes((disk.parent / "root").read_bytes())
        with pytest.raises(OSError, match="No space left"):
            commit_increment(disk, layers / "one", layers / "root", nullcontext, lambda: 0, True)
        assert [path.name for path in layers.iterdir()] == ["root"]
        (layers / "root").write_bytes(disk.read_bytes())
        _commit(disk, layers / "one", layers / "root")  # nothing changed: there is room for that
        with pytest.raises(SandboxError, match=r"no room for 16 MiB of a copy of .*root"):
            ready([layers / "one"])
        assert sorted(path.name for path in layers.iterdir()) == ["one.delta", "root"]
    finally:
        subprocess.run(["umount", str(layers)], check=True)


@pytest.mark.root
def test_an_image_that_can_be_made_again_takes_no_room_of_others(disk: Path) -> None:
    layers = disk.parent / "layers"
    layers.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=168m", "tmpfs", str(layers)], check=True)
    try:
        (layers / "root").write_bytes((disk.parent / "root").read_bytes())
        _commit(disk, layers / "one", layers / "root")
        (layers / "others").write_bytes(bytes(12 << 20))
        with pytest.raises(SandboxError, match="of which 128 stay for others"):
            ready([layers / "one"])
        assert sorted(path.name for path in layers.iterdir()) == ["one.delta", "others", "root"]
        (layers / "others").unlink()
        ready([layers / "one"])
        assert (layers / "one").read_bytes() == disk.read_bytes()
    finally:
        subprocess.run(["umount", str(layers)], check=True)


@pytest.mark.parametrize("fault", ["gone", "damaged", "another size"])
def test_what_cannot_be_built_upon_is_not(disk: Path, fault: str) -> None:
    home, parent = disk.parent, disk.parent / "one"
    _commit(disk, parent, home / "root")
    if fault == "gone":
        (home / "root").unlink()
    elif fault == "damaged":
        delta_of(parent).chmod(0o600)
        delta_of(parent).write_bytes(delta_of(parent).read_bytes()[:-1])
    else:
        os.truncate(disk, SIZE + (1 << 20))
    with open(disk, "r+b") as file:
        file.write(b"more")
    (home / "box").mkdir()
    disk.rename(home / "box" / "disk.img")
    commit(home / "box", home / "two", None, True, parent)
    assert (home / "two").read_bytes() == (home / "box" / "disk.img").read_bytes()
    assert not delta_of(home / "two").exists()


def test_an_image_of_an_earlier_boot_is_made_again(disk: Path) -> None:
    """It was not brought to the host's disk: what a crash of the host left of it is nothing to start from."""
    one = disk.parent / "one"
    _commit(disk, one, disk.parent / "root")
    ready([one])
    kept = one.stat().st_ino
    ready([one])
    assert one.stat().st_ino == kept
    one.chmod(0o600)
    one.write_bytes(b"half")
    os.setxattr(one, "user.sandyard.boot", b"earlier")
    ready([one])
    assert one.read_bytes() == disk.read_bytes()


def _rewritten(disk: Path, count: int) -> tuple[list[Path], dict[Path, bytes]]:
    """A chain in which each link has most of its blocks from the one before hidden by its own."""
    layers, states = [disk.parent / "root"], {}
    for number in range(count):
        with open(disk, "r+b") as file:
            file.write(random.Random(number).randbytes(2 << 20))
            os.pwrite(file.fileno(), b"own", (4 << 20) + number * 8192)
        layers.append(disk.parent / f"m{number}")
        _commit(disk, layers[-1], layers[-2])
        states[layers[-1]] = disk.read_bytes()
    return layers, states


def _remove(layer: Path) -> None:
    for path in layer.parent.glob(f"{layer.name}*"):
        if path.name.partition(".")[0] == layer.name:
            path.unlink()


def test_what_nobody_wants_is_merged_into_what_needs_it(disk: Path) -> None:
    layers, states = _rewritten(disk, 5)
    root, *_, before, last = layers
    assert not merge(last, [])
    assert merge(last, [*layers[2:-1]])  # all but the root and the first above it
    assert parent_of(last) == layers[1]
    assert delta_of(last).stat().st_size < 3 << 20
    for layer in layers[2:-1]:
        _remove(layer)
    for layer in (layers[1], last):
        ready([layer])
        assert layer.read_bytes() == states[layer]
    assert not before.exists()
    assert merge(last, [layers[1], root])
    _remove(layers[1])
    last.unlink()
    ready([last])
    assert last.read_bytes() == states[last]


def test_where_most_changed_it_becomes_whole(disk: Path) -> None:
    root, one, two = (disk.parent / name for name in ("root", "one", "two"))
    for at, layer, parent in ((0, one, root), (6 << 20, two, one)):
        with open(disk, "r+b") as file:
            os.pwrite(file.fileno(), random.Random(at).randbytes(6 << 20), at)
        _commit(disk, layer, parent)
    assert merge(two, [one, root])
    assert parent_of(two) is None
    for layer in (one, root):
        _remove(layer)
    ready([two])
    assert two.read_bytes() == disk.read_bytes()
    assert sorted(path.name for path in disk.parent.iterdir()) == ["disk.img", "two"]


def test_too_little_to_free_is_left(disk: Path) -> None:
    home = disk.parent
    _commit(disk, home / "one", home / "root")
    _change(disk, 200)
    _commit(disk, home / "two", home / "one")
    assert not merge(home / "two", [home / "one"])
    assert parent_of(home / "two") == home / "one"


def test_who_reads_a_chain_while_it_is_merged_gets_the_same(disk: Path) -> None:
    layers, states = _rewritten(disk, 4)
    above = disk.parent / "above"
    _change(disk, 3)
    _commit(disk, above, layers[-1])
    whole = disk.read_bytes()
    wrong: list[str] = []

    def read() -> None:
        for number in range(12):
            copy = disk.parent / f"r{number}"
            os.link(delta_of(above), delta_of(copy))  # another layer of the same chain, each made once
            try:
                ready([copy])
            except SandboxError as error:
                wrong.append(str(error))
            else:
                wrong.extend([f"{copy} differs"] * (copy.read_bytes() != whole))
            _remove(copy)

    reader = threading.Thread(target=read)
    reader.start()
    spare = layers[1:-1]
    for number in range(len(spare)):
        assert merge(layers[-1], spare[number:]) or number
        for layer in spare:
            _remove(layer)
        time.sleep(0.02)
    reader.join()
    assert wrong == []
    ready([layers[-1]])
    assert layers[-1].read_bytes() == states[layers[-1]]


_MERGE = """
import sys
from pathlib import Path
from sandyard.runtimes.container.derived import ready
from sandyard.runtimes.container.merging import merge
last, *spare = map(Path, sys.argv[1:])
print("go", flush=True)
merge(last, spare)
ready([last])
"""


@pytest.mark.parametrize("whole", [False, True])
def test_a_merge_that_is_killed_left_the_old_or_the_new(disk: Path, whole: bool) -> None:
    rng = random.Random(5)
    layers, states = _rewritten(disk, 4)
    if whole:
        with open(disk, "r+b") as file:
            os.pwrite(file.fileno(), rng.randbytes(7 << 20), 8 << 20)
        layers.append(disk.parent / "last")
        _commit(disk, layers[-1], layers[-2])
        states[layers[-1]] = disk.read_bytes()
    last, spare = layers[-1], layers[:-1] if whole else layers[1:-1]
    kept = delta_of(last).read_bytes()
    for _ in range(8):
        delta_of(last).unlink(missing_ok=True)
        delta_of(last).write_bytes(kept)
        last.unlink(missing_ok=True)
        child = subprocess.Popen([sys.executable, "-c", _MERGE, *map(str, [last, *spare])], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        time.sleep(rng.random() * 0.12)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        ready([last])
        assert last.read_bytes() == states[last]
        forget(last)
        left = {path.name for path in disk.parent.glob(f"{last.name}*")} - {last.name, delta_of(last).name}
        assert left == set()
    assert merge(last, spare) or parent_of(last) not in spare
