"""Control groups, read from trees that look like a kernel's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandyard.errors import HostError, SandboxError
from sandyard.runtimes.container.cgroups import Cgroups, Counters, detect_cgroups

V1 = ("memory", "pids", "cpu", "cpuacct", "freezer")


def mountinfo(tmp_path: Path, mounts: list[tuple[Path, str, str]]) -> Path:
    lines = [
        f"{number} 1 0:{number} / {where} rw,relatime - {kind} {kind} rw,{options}\n"
        for number, (where, kind, options) in enumerate(mounts)
    ]
    (tmp_path / "mountinfo").write_text("".join(lines))
    return tmp_path / "mountinfo"


def test_version_2_is_found(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = detect_cgroups("mine", mountinfo(tmp_path, [(tmp_path, "cgroup2", "nsdelegate")]))
    assert found == Cgroups({"": tmp_path}, "mine")
    assert found.version == 2
    assert found.swap_limit


def test_version_1_beside_an_empty_version_2_hides_the_latter(tmp_path: Path) -> None:
    unified = tmp_path / "unified"
    unified.mkdir()
    (unified / "cgroup.controllers").write_text("\n")
    mounts = [(unified, "cgroup2", "x")]
    mounts += [(tmp_path / name, "cgroup", name) for name in ("memory", "pids")]
    mounts += [(tmp_path / "cpu,cpuacct", "cgroup", "cpu,cpuacct"), (tmp_path / "systemd", "cgroup", "name=systemd")]
    found = detect_cgroups("mine", mountinfo(tmp_path, mounts))
    assert found.version == 1
    assert found.unmount == (unified,)
    assert found.roots["cpu"] == found.roots["cpuacct"] == tmp_path / "cpu,cpuacct"
    assert not found.swap_limit


def test_a_host_that_cannot_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="no controller memory, pids"):
        detect_cgroups("mine", mountinfo(tmp_path, [(tmp_path / "cpu", "cgroup", "cpu,cpuacct")]))


def version2(tmp_path: Path) -> Cgroups:
    group = tmp_path / "mine" / "box"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("4096\n")
    (group / "memory.stat").write_text("anon 1\nfile 1024\n")
    (group / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (group / "pids.current").write_text("3\n")
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\n")
    (group / "cgroup.procs").write_text("")
    return Cgroups({"": tmp_path}, "mine")


def version1(tmp_path: Path) -> Cgroups:
    for name in V1:
        (tmp_path / name / "mine" / "box").mkdir(parents=True)
        (tmp_path / name / "mine" / "box" / "cgroup.procs").write_text("")
    (tmp_path / "memory/mine/box/memory.usage_in_bytes").write_text("4096\n")
    (tmp_path / "memory/mine/box/memory.stat").write_text("cache 9\ntotal_cache 1024\n")
    (tmp_path / "memory/mine/box/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (tmp_path / "cpuacct/mine/box/cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "pids/mine/box/pids.current").write_text("3\n")
    return Cgroups({name: tmp_path / name for name in V1}, "mine")


@pytest.mark.parametrize("make", [version1, version2])
def test_counters_mean_the_same_in_both_versions(tmp_path: Path, make: Callable[[Path], Cgroups]) -> None:
    groups = make(tmp_path)
    assert groups.read("box") == Counters(memory=4096, cache=1024, cpu_seconds=2.5, pids=3, oom_kills=1)
    assert groups.read("gone") == Counters()
    assert groups.ids() == {"box"}
    assert groups.pids("gone") == set()


@pytest.mark.parametrize("make", [version1, version2])
def test_all_sandboxes_together_are_counted(tmp_path: Path, make: Callable[[Path], Cgroups]) -> None:
    """Pages of files can be had back, but not those of a tmpfs."""
    groups = make(tmp_path)
    assert groups.taken() == (0, 0)
    if groups.version == 2:
        (tmp_path / "mine/memory.current").write_text("8192\n")
        (tmp_path / "mine/memory.stat").write_text("anon 1\nfile 1024\nshmem 24\n")
    else:
        (tmp_path / "memory/mine/memory.usage_in_bytes").write_text("8192\n")
        (tmp_path / "memory/mine/memory.stat").write_text("cache 9\ntotal_cache 1024\ntotal_shmem 24\n")
    assert groups.taken() == (8192, 1000)


def test_nothing_is_done_to_what_is_not_there(tmp_path: Path) -> None:
    groups = version2(tmp_path)
    deadline = time.monotonic() + 1
    groups.kill("gone", deadline)
    groups.remove("gone", deadline)
    assert groups.holds("box", 2**22 + 1) is False


def test_version_2_is_told_to_delegate(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    Cgroups({"": tmp_path}, "mine").prepare()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert (tmp_path / "mine/cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_a_tree_that_cannot_be_written_is_a_host_error(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("in the way")
    with pytest.raises(HostError, match="cannot delegate"):
        Cgroups({"": tmp_path}, "mine").prepare()


def test_freezing_in_version_2_waits_for_the_kernel_and_gives_up(tmp_path: Path) -> None:
    group = tmp_path / "mine" / "box"
    group.mkdir(parents=True)
    groups = Cgroups({"": tmp_path}, "mine")
    (group / "cgroup.freeze").write_text("0")
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    groups.freeze("box", 1.0)
    assert (group / "cgroup.freeze").read_text() == "1"
    assert groups.frozen("box")
    groups.thaw("box")
    assert (group / "cgroup.freeze").read_text() == "0"
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    with pytest.raises(SandboxError, match="do not freeze within"):
        groups.freeze("box", 0.02)
    assert (group / "cgroup.freeze").read_text() == "0"  # it runs, as before


def test_freezing_in_version_1_needs_its_controller(tmp_path: Path) -> None:
    group = tmp_path / "freezer" / "mine" / "box"
    group.mkdir(parents=True)
    groups = Cgroups({name: tmp_path / name for name in V1}, "mine")
    groups.freeze("box", 1.0)
    assert (group / "freezer.state").read_text() == "FROZEN"
    groups.thaw("box")
    assert not groups.frozen("box")
    without = Cgroups({name: tmp_path / name for name in V1 if name != "freezer"}, "mine")
    assert not without.freezer
    without.thaw("box")  # nothing to do, and no error
