"""The images a sandbox's disk consists of, without a guest: what is kept, what is read, and what a VMM may have put
there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.cgroup import VmLimits, make_groups, tool_group
from sandyard.runtimes.microvm.disks import BLANK, Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Drive
from sandyard.runtimes.microvm.qcow2 import Image, header_of, nested
from tests.yard import needs_qemu

pytestmark = [pytest.mark.root, needs_qemu]
SPEC = SandboxSpec("one", Rootfs([]), Resources(disk_mb=16))
_MIB = 1 << 20


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout.of(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    for path in (made.disk("one"), made.images, made.keeps):
        path.mkdir(parents=True)
    os.chown(made.disk("one"), 12345, 12345)
    return made


@pytest.fixture
def disks(layout: Layout) -> Disks:
    return Disks(layout, SPEC)


def here(disks: Disks, number: int | None = None) -> str:
    """Its chain, as it is opened where this test runs."""
    return nested([Image(path, "raw" if path.name == BLANK else "qcow2") for path in disks.chain(number)])


def write(disks: Disks, at: int, pattern: int, size: int = _MIB) -> None:
    """As the guest does: to the uppermost image."""
    subprocess.run(["qemu-io", "-c", f"write -P {pattern} {at} {size}", here(disks)], check=True, capture_output=True)


def reads(disks: Disks, at: int, number: int | None = None) -> int:
    """The byte that is there, as image `number` has it."""
    words = ["qemu-io", "-r", "-c", f"read -v {at} 1", here(disks, number)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return int(said.split(":", 1)[1].split()[0], 16)


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_what_is_kept_costs_what_was_written_since(disks: Disks) -> None:
    disks.add()
    write(disks, 4 * _MIB, 1, 8 * _MIB)
    disks.add()
    disks.keep(0, ended=False)
    write(disks, 4 * _MIB, 2)
    disks.add()
    before = (disks.kept / disk.image(0)).stat()
    disks.keep(1, ended=False, durable=True)
    first, second = (disks.kept / disk.image(number) for number in range(2))
    assert first.stat().st_ino == before.st_ino
    assert 8 * _MIB <= taken(first) < 9 * _MIB
    assert _MIB <= taken(second) < 2 * _MIB
    for path in (first, second):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o444)
        assert disks.digest(path) == disk.digest(path)  # as it was taken while it was copied
    # Its VMM has its own: nothing that it does to those reaches a snapshot.
    assert [number for number in range(3) if (disks.own / disk.image(number)).exists()] == [0, 1, 2]
    (disks.own / disk.image(0)).write_bytes(b"x")
    assert [reads(disks, 4 * _MIB, number) for number in range(3)] == [1, 2, 2]
    assert disks.depth() == 3
    assert [image.path.parent.name for image in disks.images()] == ["disks", "disks", "disks", "vm"]


def test_what_a_vmm_that_has_ended_wrote_is_kept_as_it_is(disks: Disks) -> None:
    disks.add()
    write(disks, 0, 7)
    written = (disks.own / disk.image(0)).stat()
    assert disks.writable()
    disks.keep(0, ended=True)
    kept = (disks.kept / disk.image(0)).stat()
    assert (kept.st_ino, kept.st_uid, kept.st_mode & 0o777) == (written.st_ino, 0, 0o444)
    assert list(disks.own.iterdir()) == []
    assert not disks.writable()
    disks.add()
    assert disks.writable()
    assert reads(disks, 0) == 7
    assert disks.used_bytes() == sum(taken(path) for path in (*disks.own.iterdir(), disks.kept / disk.image(0)))
    os.link(disks.kept / disk.image(0), disks.kept.parent / "snapshot")  # counted there
    assert disks.used_bytes() == taken(disks.own / disk.image(1))


def test_an_image_that_stands_for_itself_is_the_lowest(disks: Disks) -> None:
    for number in range(3):
        disks.add()
        write(disks, 0, number + 1)
    disks.keep(1, ended=False)
    whole = disks.own / "whole"
    # The guest took away what was written before: what says nothing of a place must not let it through from below.
    disk.run(["qemu-img", "create", "-q", "-f", "qcow2", str(whole), str(header_of(disks.own / disk.image(0)).size)])
    whole.replace(disks.own / disk.image(2))
    assert disks.chain() == [disks.own / disk.image(2)]
    assert reads(disks, 0) == 0
    disks.prune(ended=False)
    left = [path.name for home in (disks.own, disks.kept) for path in home.iterdir()]
    assert left == [disk.image(2)]
    disks.add()
    disks.keep(2, ended=False)
    assert [path.name for path in disks.chain()] == [disk.image(2), disk.image(3)]
    assert (disks.depth(), disks.top()) == (2, 3)


def test_an_image_that_got_all_counts_in_place_of_its_copy(disks: Disks) -> None:
    for number in range(5):
        disks.add()
        write(disks, number * _MIB, number + 1)
        if number == 4:
            break
        disks.keep(number, ended=False)
    assert disks.retired() == 3
    (disks.kept / disk.image(3)).rename(disks.kept / "away")  # the disk was full: it is yet to be copied
    assert disks.retired() == 2
    (disks.kept / "away").rename(disks.kept / disk.image(3))
    whole, size = disks.own / "whole", header_of(disks.own / disk.image(0)).size
    disks.shortened(2)  # it did not come to that
    assert disks.depth() == 5
    # As QEMU leaves image 2, below two that came meanwhile.
    disk.run(["qemu-img", "convert", "-U", "-O", "qcow2", here(disks, 2), str(whole)])
    whole.replace(disks.own / disk.image(2))
    assert disks.chain()[3] == disks.kept / disk.image(2)
    disks.shortened(2)
    assert disks.chain() == [
        *(disks.own / disk.image(2), disks.kept / disk.image(3)),
        disks.own / disk.image(4),
    ]
    assert header_of(disks.chain()[0]).size == size
    assert [reads(disks, number * _MIB) for number in range(5)] == [1, 2, 3, 4, 5]
    disks.keep(3, ended=False)  # what the next snapshot has
    assert [path.parent for path in disks.chain(3)] == [disks.kept, disks.kept]
    assert taken(disks.kept / disk.image(2)) >= 3 * _MIB
    (disks.kept / disk.image(2)).unlink()
    disks.prune(ended=True)  # its VMM ended before there was one
    assert disks.chain()[0].parent == disks.own
    disks.keep(4, ended=True)
    disks.prune(ended=True)
    assert list(disks.own.iterdir()) == []
    assert [reads(disks, number * _MIB) for number in range(5)] == [1, 2, 3, 4, 5]


def test_what_a_sandbox_of_before_has_is_found(disks: Disks) -> None:
    """All in the directory of its VMM, the blank one too."""
    os.link(disk.blank(disks.kept.parent.parent / "images", 16), disks.own / BLANK)
    size = (disks.own / BLANK).stat().st_size
    disk.above(disks.own, BLANK, "raw", size, 0)
    disk.above(disks.own, disk.image(0), "qcow2", size, 1)
    write(disks, 0, 5)
    assert [path.name for path in disks.chain()] == [BLANK, disk.image(0), disk.image(1)]
    assert disks.chain()[0].parent == disks.kept
    disks.keep(1, ended=True)
    assert reads(disks, 0) == 5


def test_an_image_that_is_gone_is_named(disks: Disks) -> None:
    for _ in range(3):
        disks.add()
    (disks.own / disk.image(1)).unlink()
    with pytest.raises(SandboxError, match="sandbox one: image 1 of its disk is not there"):
        disks.chain()


def test_what_a_killed_server_left_goes(disks: Disks) -> None:
    disks.add()
    for name in ("layer-12ab", "state-12ab"):
        (disks.own / name).write_bytes(b"half")
    disks.keep(0, ended=False)
    (disks.kept / ".scratch").write_bytes(b"half")
    disks.sweep()
    assert sorted(path.name for path in disks.own.iterdir()) == [disk.image(0)]
    assert sorted(path.name for path in disks.kept.iterdir()) == [BLANK, disk.image(0), f"{disk.image(0)}.digest"]


def _link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def _data_file(path: Path, victim: Path) -> None:
    size = victim.stat().st_size
    kept = victim.read_bytes()
    options = f"data_file={victim},data_file_raw=on"
    disk.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, str(path), str(size)])
    victim.write_bytes(kept)


def _pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def _garbage(path: Path, victim: Path) -> None:
    path.write_bytes(b"QFI\xfb")


def _huge(path: Path, victim: Path) -> None:
    disk.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"])
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("harm", [_link, _data_file, _pipe, _garbage, _huge])
@pytest.mark.parametrize("ended", [False, True])
def test_what_a_vmm_put_in_place_of_an_image_is_refused(
    disks: Disks, tmp_path: Path, harm: Callable[[Path, Path], None], ended: bool
) -> None:
    if harm is _huge and ended:
        return  # it is not read then, and takes no room
    victim, path = tmp_path / "victim", disks.own / disk.image(0)
    victim.write_bytes(b"of the host".ljust(_MIB))
    disks.add()
    path.unlink()
    harm(path, victim)
    before = victim.stat()
    with pytest.raises(SandboxError, match=r"disk0\.qcow2"):
        disks.keep(0, ended=ended)
    assert [each.name for each in disks.kept.iterdir() if each.name != BLANK] == []
    assert victim.read_bytes() == b"of the host".ljust(_MIB)
    assert (victim.stat().st_mode, victim.stat().st_uid) == (before.st_mode, before.st_uid)
    if harm is not _huge:
        with pytest.raises(SandboxError, match=r"disk0\.qcow2"):
            disks.chain()


def test_numbers_and_sizes_are_not_for_a_vmm_to_say(disks: Disks) -> None:
    disks.add()
    (disks.own / disk.image(999_999_999)).write_bytes(b"x")
    with pytest.raises(SandboxError, match=r"disk999999999\.qcow2 is no image"):
        disks.keep(disks.top(), ended=False)  # at once
    with pytest.raises(SandboxError, match="is no image"):
        disks.add()
    disks.drop_above(0)
    disk.run(["qemu-img", "create", "-q", "-f", "qcow2", str(disks.own / disk.image(1)), "4T"])
    with pytest.raises(SandboxError, match=f"says that it is a disk of {4 << 40} bytes"):
        disks.add()


def test_strange_names_and_links_are_not_followed(disks: Disks, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(_MIB))
    disks.add()
    (disks.own / "diskx.qcow2").write_bytes(b"x")
    (disks.own / "disk1.qcow2").symlink_to(tmp_path / "big")
    assert disks.top() == 1
    assert disks.used_bytes() < 256 << 10
    disks.drop_above(0)
    assert disks.top() == 0
    assert (tmp_path / "big").exists()


def test_a_name_in_a_header_is_nothing_to_go_by(disks: Disks, tmp_path: Path) -> None:
    """Neither to a tool nor to QEMU: a VMM may have written that of any file."""
    secret, path = tmp_path / "secret", disks.own / disk.image(0)
    secret.write_bytes(b"\x42" * _MIB)
    disks.add()
    size = header_of(path).size
    disk.run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", str(secret), "-F", "raw", str(path), str(size)])
    assert reads(disks, 8192) != 0x42
    made = tmp_path / "made"
    disk.run(["qemu-img", "convert", "-U", "-O", "qcow2", here(disks), str(made)])
    assert b"\x42" * 4096 not in made.read_bytes()
    assert header_of(made).whole
    below, top = [Image(found, "raw" if found.name == BLANK else "qcow2") for found in disks.chain()]
    assert opened_by_qemu(Drive("disk", top.path, "qcow2", writable=True, below=[below])) == {below.path, top.path}
    alone = Drive("layer0", top.path, "qcow2")
    assert opened_by_qemu(alone) == {top.path}
    # This is what makes a look at each header needful: no option keeps QEMU from it.
    path.unlink()
    _data_file(path, secret)
    assert opened_by_qemu(alone) == {path, secret}
    with pytest.raises(SandboxError, match="has what no image of a sandbox has"):
        disks.images()


def opened_by_qemu(drive: Drive) -> set[Path]:
    """The files that QEMU has open for a drive."""
    program = shutil.which(Settings().microvm.qemu)
    assert program is not None
    nodes = [part for node in drive.nodes() for part in ("-blockdev", json.dumps(node))]
    questions = ({"execute": "qmp_capabilities"}, {"execute": "query-named-block-nodes"}, {"execute": "quit"})
    done = subprocess.run(
        [program, "-M", "none", "-nodefaults", "-display", "none", "-qmp", "stdio", *nodes],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=True,
    )
    (nodes_found,) = [
        answer["return"]
        for line in done.stdout.splitlines()
        if isinstance((answer := json.loads(line)).get("return"), list)
    ]
    return {Path(node["file"]) for node in nodes_found if node["drv"] == "file"}


def test_a_tool_ends_with_its_sandbox_also_that_of_a_killed_server(tmp_path: Path) -> None:
    host = Host(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    groups = make_groups(host.cgroups, tool_group("one"), VmLimits(64 << 20, 1.0))
    assert host.ids() == set()  # it is no sandbox
    with subprocess.Popen(["sleep", "600"]) as tool:
        for group in groups:
            (group / "cgroup.procs").write_text(str(tool.pid))
        assert host.cgroups.pids(tool_group("one")) == {tool.pid}
        host.end_tools("one")
        assert tool.wait(timeout=20) == -signal.SIGKILL
    assert not any(group.exists() for group in groups)
    host.end_tools("one")
    host.cgroups.remove_parent()


def test_a_digest_is_of_what_a_file_says_not_of_where_it_has_holes(tmp_path: Path) -> None:
    content = os.urandom(100_000) + bytes(300_000) + os.urandom(70_000)
    dense, sparse, other = tmp_path / "dense", tmp_path / "sparse", tmp_path / "other"
    dense.write_bytes(content)
    disk.copy(dense, sparse, 1 << 20)
    assert taken(sparse) < taken(dense)
    other.write_bytes(content + b"\0")
    assert disk.digest(dense) == disk.digest(sparse) != disk.digest(other)
    assert sparse.read_bytes() == content
    with pytest.raises(SandboxError, match="has more than 131072 bytes"):
        disk.copy(dense, tmp_path / "more", 128 << 10)
