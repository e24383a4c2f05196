"""What VMMs that stand ready are made of, without one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import cast

import pytest

from sandyard.config import Settings
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.container.cgroups import Cgroups
from sandyard.runtimes.exchange import exchange
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.assets import Assets
from sandyard.runtimes.microvm.choice import Choice, Engine
from sandyard.runtimes.microvm.disk import run
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import ID
from sandyard.runtimes.microvm.kind import Kind, vcpus
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Absent
from sandyard.runtimes.microvm.owners import Owner, sweep
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.spare import _places
from sandyard.runtimes.microvm.starting import Starter
from tests.yard import needs_qemu, node_home

CHOICE = Choice(Engine("qemu", "1"), Assets(Path("kernel"), Path("initrd"), "1", "agent", "digest"), "tcg", 1.0)
KIND = Kind(CHOICE.engine, CHOICE.accel, 224, 64, 192, 1.0, tap=False, layers=1)


@pytest.fixture
def layout() -> Iterator[Layout]:
    with node_home() as home:
        made = Layout(home / "run", home / "state", 100_000)
        made.prepare()
        yield made


@pytest.fixture
def cgroups(tmp_path: Path) -> Cgroups:
    return Cgroups({"": tmp_path / "cgroup"}, "vms")


def leave(layout: Layout, cgroups: Cgroups, name: str) -> list[Path]:
    places = [layout.home(name), layout.disk(name), layout.memory(name), cgroups.roots[""] / cgroups.parent / name]
    for path in places:
        path.mkdir(parents=True)
    return places


def test_kinds_differ_by_all_that_a_vmm_is_started_with() -> None:
    changes = ({"memory_mb": 225}, {"cpu": 0.5}, {"tap": True}, {"layers": 0}, {"overhead_mb": 200})
    kinds = {KIND, replace(KIND), *(replace(KIND, **change) for change in changes)}
    kinds |= {replace(KIND, engine=Engine("qemu", "2")), replace(KIND, accel="kvm")}
    assert len(kinds) == 8


def test_what_boots_from_now_on_makes_no_other_kind(layout: Layout) -> None:
    """One that waits for a state has no kernel but the one in the memory that it gets."""
    starter, spec = Starter(Settings(), layout, cast(Cgroups, None)), SandboxSpec("box", Rootfs([layout.state]))
    later = replace(CHOICE, assets=replace(CHOICE.assets, digest="another", kernel=Path("another")), boot_seconds=2.0)
    assert starter.kind(CHOICE, spec) == starter.kind(later, spec)
    boots, waits = (" ".join(KIND.machine([], 5, 6, incoming=incoming).command()) for incoming in (False, True))
    for option in ("-kernel /shared/kernel", "-initrd /shared/initrd", "-append "):
        assert option in boots
        assert option not in waits


@needs_qemu
@pytest.mark.root
@pytest.mark.parametrize(("cpu", "cores", "count"), [(0.1, 4, 1), (1.5, 4, 2), (64, 4, 4), (2, 1, 1), (2, None, 1)])
def test_a_guest_has_no_more_processors_than_the_host(
    monkeypatch: pytest.MonkeyPatch, cpu: float, cores: int | None, count: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert vcpus(cpu) == count


def test_places_are_where_the_disks_of_a_machine_are(layout: Layout, tmp_path: Path) -> None:
    """In the same order, under the same names: a state that was taken of one is loaded by the other."""
    layers = [tmp_path / f"layer{number}" for number in range(KIND.layers)]
    for layer in layers:
        run(["qemu-img", "create", "-q", "-f", "qcow2", str(layer), "1M"])
    (tmp_path / "files").mkdir()
    spec = SandboxSpec("box", Rootfs([*layers, tmp_path / "files"]), Resources(disk_mb=16))
    starter = Starter(Settings(), layout, cast(Cgroups, None))
    starter.make_own("box")
    layout.images.mkdir(parents=True, exist_ok=True)
    own = Disks(layout, spec)
    own.prepare()
    own.add()
    places, (disks, _) = _places(KIND.layers), starter.drives(spec)
    whats = [(each.serial, each.writable) for each in disks]
    assert [(each.serial, each.writable) for each in places] == whats
    assert [serial for serial, writable in whats if writable] == ["disk"]
    commands = [KIND.machine(each, 5, 6, incoming=True).command() for each in (places, disks)]
    devices = [[part for part in command if part.startswith("virtio")] for command in commands]
    assert [part.replace("drive=absent-", "drive=") for part in devices[0]] == devices[1]
    names = [{node["node-name"] for each in found for node in each.nodes()} for found in (places, disks)]
    assert not names[0] & names[1]
    assert [node["read-only"] for node in (*Absent("base").nodes(), *Absent("disk", writable=True).nodes())] == [
        True,
        False,
    ]
    files = [node["filename"] for disk in disks for node in disk.nodes() if node["driver"] == "file"]
    assert [name for name in files if not name.startswith("/shared/")] == ["/vm/disk0.qcow2"]


def test_no_sandbox_has_the_name_of_one(layout: Layout) -> None:
    owner = Owner(layout)
    names = [owner.name(), owner.name()]
    assert len(set(names)) == 2
    assert not any(map(ID.fullmatch, names))
    owner.close()
    assert os.listdir(layout.homes) == []


def test_what_a_dead_server_left_goes_and_what_a_living_ones_is_stays(layout: Layout, cgroups: Cgroups) -> None:
    living, dead = Owner(layout), Owner(layout)
    kept = leave(layout, cgroups, living.name())
    gone = leave(layout, cgroups, dead.name()) + leave(layout, cgroups, dead.name())
    gone += leave(layout, cgroups, "spare-0123abcd-1")  # after the host was started anew there is no lock either
    box = leave(layout, cgroups, "box")
    os.close(dead._descriptor)  # as its end does it
    sweep(layout, cgroups)
    assert all(path.is_dir() for path in kept + box)
    assert not any(path.exists() for path in gone)
    assert os.listdir(layout.homes).count(living._path.name) == 1
    assert len([name for name in os.listdir(layout.homes) if name.startswith(".spares")]) == 1
    living.close()
    sweep(layout, cgroups)
    assert not any(path.exists() for path in kept)


def test_directories_change_places_at_once(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    exchange(one, other)
    assert (os.listdir(one), os.listdir(other)) == (["other"], ["one"])
    with pytest.raises(FileNotFoundError):
        exchange(one, tmp_path / "none")


@needs_qemu
@pytest.mark.parametrize(("backing", "kind"), [("blank.img", "raw"), ("disk123456789.qcow2", "qcow2")])
def test_an_empty_image_is_what_qemu_img_makes(tmp_path: Path, backing: str, kind: str) -> None:
    home, size = tmp_path / "disks" / "box", 3 << 30
    home.mkdir(parents=True)
    below = home / backing
    subprocess.run(["qemu-img", "create", "-q", "-f", kind, str(below), str(size)], check=True)
    for _ in range(2):  # also from what is kept of the first
        made = disk.above(home, backing, kind, size, 7)
    assert [path.name for path in home.parent.iterdir()] == ["box"]
    told = home / "told"
    create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", backing, "-F", kind, str(told)]
    subprocess.run(create, check=True)
    subprocess.run(["qemu-img", "check", "-q", str(made)], check=True)
    infos = []
    for path in (made, told):
        words = ["qemu-img", "info", "--output=json", str(path)]
        infos.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    for info in infos:
        del info["filename"]
        assert info.pop("actual-size") < 256 << 10
        info.pop("children", None)  # of later versions, with names of files
    assert infos[0] == infos[1]


@pytest.mark.root
def test_images_are_given_and_what_others_share_is_not(layout: Layout, tmp_path: Path) -> None:
    home, target, outside = layout.disk("box"), tmp_path / "new", tmp_path / "outside"
    for path in (home, target):
        path.mkdir()
    names = ("disk0.qcow2", "disk1.qcow2", "state-1")
    for path in (*(home / name for name in names), outside):
        path.touch()
    for path in (home / "disk1.qcow2", home / "state-1", outside):
        os.chown(path, 1234, 1234)
    (home / "disk2.qcow2").symlink_to(outside)  # by a VMM that was broken into
    os.mkfifo(home / "disk3.qcow2")
    disks = Disks(layout, SandboxSpec("box", Rootfs([])))
    disks.link(target)
    disks.hand_to(4321)
    assert sorted(os.listdir(target)) == sorted(names[:2])
    assert [(target / name).stat().st_uid for name in names[:2]] == [0, 4321]
    assert outside.stat().st_uid == 1234


async def test_descriptors_go_with_a_command(tmp_path: Path) -> None:
    got: list[tuple[bytes, int]] = []

    def serve(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b'{"QMP": {}}\n')
            while True:
                line, descriptors, _, _ = socket.recv_fds(peer, 4096, 4)
                if not line:
                    return
                for each in descriptors:
                    got.append((line, os.fstat(each).st_ino))
                    os.close(each)
                peer.sendall(json.dumps({"return": len(descriptors), "id": json.loads(line)["id"]}).encode() + b"\n")

    with socket.socket(socket.AF_UNIX) as listener, FileIO(tmp_path / "file", "w") as file:
        listener.bind(str(tmp_path / "q"))
        listener.listen()
        serving = asyncio.ensure_future(asyncio.to_thread(serve, listener))
        client = await Qmp.connect(tmp_path / "q", 5)
        assert await client.execute("add-fd", descriptors=[file.fileno()]) == 1
        assert await client.execute("query-status") == 0
        await client.close()
        await serving
        ((line, inode),) = got
        assert json.loads(line)["execute"] == "add-fd"
        assert inode == os.fstat(file.fileno()).st_ino
