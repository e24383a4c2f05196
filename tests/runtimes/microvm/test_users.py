"""The host users of VMMs: each has one of its own, and none is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sandyard.errors import CreateFailed
from sandyard.runtimes.microvm import disk, users
from sandyard.runtimes.microvm.layout import Layout, user_of
from sandyard.runtimes.microvm.users import make_home
from tests.yard import node_home

pytestmark = pytest.mark.root
BASE = 100_000
MAKER = """
import os, signal, sys
from pathlib import Path
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.users import make_home
run, state, name, count, dies = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
layout = Layout(run, state, 100_000)
if dies:
    setattr(*((os, dies) if hasattr(os, dies) else (Path, dies)), lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
for number in range(count):
    print(make_home(layout, layout.disk(f"{name}{number}")), flush=True)
"""


@pytest.fixture
def layout() -> Iterator[Layout]:
    with node_home() as home:
        made = Layout(home / "run", home / "state", BASE)
        made.prepare()
        yield made


def maker(layout: Layout, run: str, count: int = 1, dies: str = "") -> subprocess.Popen[str]:
    words = [str(layout.run / run), str(layout.state), f"{run}x", str(count), dies]
    return subprocess.Popen([sys.executable, "-c", MAKER, *words], stdout=subprocess.PIPE, text=True)


def test_a_directory_is_for_one_user_who_makes_nothing_in_it(layout: Layout) -> None:
    uid = make_home(layout, layout.disk("box"))
    found = layout.disk("box").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (0, uid, 0o750)
    assert layout.uid("box") == uid >= BASE + 65536
    written = disk.to_be_written(layout.disk("box"), "state").stat()
    assert (written.st_uid, written.st_gid, written.st_mode & 0o777) == (uid, uid, 0o600)
    with pytest.raises(CreateFailed, match="File exists"):
        make_home(layout, layout.disk("box"))


def test_two_processes_never_give_the_same(layout: Layout) -> None:
    """With the same state, whatever their run directories are."""
    makers = [maker(layout, run, 100) for run in ("one", "other", "third")]
    said = [process.communicate()[0].split() for process in makers]
    assert [len(each) for each in said] == [100] * 3
    assert len({uid for each in said for uid in each}) == 300
    assert {str(user_of(path)) for path in layout.disks.iterdir()} == {uid for each in said for uid in each}


@pytest.mark.parametrize("step", ["chown", "chmod", "getpriority"])
def test_what_a_killed_process_was_at_takes_none(layout: Layout, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    process = maker(layout, "dead", dies=step)
    assert process.communicate()[0] == ""
    assert process.returncode == -signal.SIGKILL
    monkeypatch.setattr(users, "COUNT", 2)
    left = layout.disk("deadx0")
    if step == "chown":
        with pytest.raises(OSError, match="no VMM's"):  # it is root's: none is to run as that
            layout.uid("deadx0")
    if left.exists():
        shutil.rmtree(left)  # whoever removes what has that name needs to know no more
    assert len({make_home(layout, layout.disk(name)) for name in ("a", "b")}) == 2


def test_they_are_bounded_and_free_again_with_what_they_had(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "COUNT", 3)
    given = {name: make_home(layout, layout.disk(name)) for name in "abc"}
    assert sorted(given.values()) == [BASE + 65536 + number for number in range(3)]
    with pytest.raises(CreateFailed, match=r"create failed at user: all 3 .* are taken") as caught:
        make_home(layout, layout.disk("d"))
    assert "container.uid_base" in (caught.value.remedy or "")
    assert not layout.disk("d").exists()
    layout.disk("b").rmdir()
    assert make_home(layout, layout.disk("d")) == given["b"]


def test_one_that_was_given_comes_again_late(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "COUNT", 3)
    given = []
    for _ in range(4):
        given.append(make_home(layout, layout.disk("box")))
        layout.disk("box").rmdir()
    assert len({*given[:3]}) == 3
    assert given[3] == given[0]
    (layout.assets / users._LOCK).write_text("damaged")
    assert make_home(layout, layout.disk("box")) in given


def test_what_has_a_file_or_a_process_is_taken(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "COUNT", 5)
    first = layout.first_uid
    of_before, half = layout.disk("before"), layout.disk("half")
    for path in (of_before, half):
        path.mkdir()
    os.chown(of_before, first, first)  # as earlier versions made it
    (half / "disk0.qcow2").touch()
    os.chown(half / "disk0.qcow2", first + 1, first + 1)  # handed on, and no further
    (layout.disks / ".box-0123").touch()
    os.chown(layout.disks / ".box-0123", first + 2, first + 2)
    alone = ["setpriv", f"--reuid={first + 3}", f"--regid={first + 3}", "--clear-groups", "sh", "-c"]
    with subprocess.Popen([*alone, "echo; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert make_home(layout, layout.disk("box")) == first + 4
        with pytest.raises(CreateFailed):
            make_home(layout, layout.disk("more"))
        process.communicate(b"\n")
    assert make_home(layout, layout.disk("more")) == first + 3
    assert layout.uid("before") == first
    users.give_home(of_before, first)  # as its next start does
    assert (layout.uid("before"), of_before.stat().st_uid, of_before.stat().st_mode & 0o777) == (first, 0, 0o750)


def test_states_begin_at_different_places(layout: Layout) -> None:
    other = Layout(layout.run, layout.state / "other", BASE)
    other.prepare()
    assert make_home(layout, layout.disk("box")) != make_home(other, other.disk("box"))
