"""What a guest is made of, without booting one."""

from __future__ import annotations

import json
import lzma
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from sandyard.errors import CreateFailed, HostError
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.microvm import conf
from sandyard.runtimes.microvm.cpio import Cpio
from sandyard.runtimes.microvm.images import sweep
from sandyard.runtimes.microvm.machine import Drive, Machine
from sandyard.runtimes.microvm.modules import Modules
from sandyard.runtimes.microvm.starting import split_layers

SUBNET = IPv4Network("10.1.0.0/30")


def module(depends: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0"


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "top.ko").write_bytes(module("mid-dle,low"))
    (tmp_path / "kernel" / "mid-dle.ko.xz").write_bytes(lzma.compress(module("low")))
    (tmp_path / "kernel" / "low.ko").write_bytes(module(""))
    (tmp_path / "modules.builtin").write_text("kernel/fs/inside.ko\n")
    loaded = Modules(tmp_path).ordered(("inside", "top"))
    assert [name for name, _ in loaded] == ["low", "mid_dle", "top"]
    assert all(content.startswith(b"\x7fELF") for _, content in loaded)
    with pytest.raises(HostError, match="no kernel module absent"):
        Modules(tmp_path).ordered(("absent",))


def test_modules_that_need_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ko").write_bytes(module("b"))
    (tmp_path / "b.ko").write_bytes(module("a"))
    with pytest.raises(HostError, match="which b needs"):
        Modules(tmp_path).ordered(("a",))


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    archive = Cpio()
    archive.directory("d")
    archive.file("d/f", b"hello", 0o755)
    listing = subprocess.run(
        ["python3", "-c", "import sys; sys.stdout.write(sys.stdin.buffer.read().hex())"],
        input=archive.finish(),
        capture_output=True,
        check=True,
    )
    raw = bytes.fromhex(listing.stdout.decode())
    entries, at = [], 0
    while True:
        fields = [int(raw[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = raw[at + 110 : at + 110 + fields[11] - 1].decode()
        data = (at + 110 + fields[11] + 3) // 4 * 4
        if name == "TRAILER!!!":
            break
        entries.append((name, oct(fields[1]), raw[data : data + fields[6]]))
        at = (data + fields[6] + 3) // 4 * 4
    assert entries == [("d", "0o40755", b""), ("d/f", "0o100755", b"hello")]


def test_configuration_says_everything_once() -> None:
    spec = SandboxSpec("one", Rootfs([], env={"A": "b\nc"}), hostname="me")
    fresh = conf.configuration(spec, 2, SUBNET, used=False)
    records = fresh.rstrip(b"\0").split(b"\0")
    assert len(fresh) % 4096 == 0
    assert {b"l2", b"p256", b"m536870912", b"hme", b"eA=b\nc", b"f/etc/hosts"} <= set(records)
    assert b"f/etc/hosts" not in conf.configuration(spec, 2, SUBNET, used=True).split(b"\0")
    assert not any(record.startswith(b"n") for record in records)
    with pytest.raises(ValueError, match="are the most"):
        conf.configuration(SandboxSpec("one", Rootfs([], env={"A": "x" * (1 << 20)})), 0, SUBNET, used=False)


def test_a_network_is_told_with_its_resolver(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 10.1.0.1\n")
    spec = SandboxSpec("one", Rootfs([]), network=tmp_path / "net")
    records = conf.configuration(spec, 0, SUBNET, used=False).split(b"\0")
    assert b"n10.1.0.2/30 10.1.0.1" in records
    assert records[records.index(b"f/etc/resolv.conf") + 1] == b"tnameserver 10.1.0.1\n"
    machine = Machine("qemu", "tcg", Path("k"), Path("i"), 256, 1, 7, 8, tap=True).command()
    assert "tap,id=net,ifname=tap0,script=no,downscript=no,vhost=off" in machine
    assert any(part.startswith("virtio-net-pci,") for part in machine)


def test_committed_layers_lie_above_directories(tmp_path: Path) -> None:
    directory, file = tmp_path / "d", tmp_path / "f"
    directory.mkdir()
    file.touch()
    assert split_layers([file, directory]) == ([directory], [file])
    for wrong in ([file], [directory, file], [tmp_path / "none"], [file] * 17 + [directory]):
        with pytest.raises(CreateFailed) as caught:
            split_layers(wrong)
        assert caught.value.stage == "rootfs"


def test_a_machine_is_confined_and_can_be_restored() -> None:
    disk = Drive("disk", Path("/vm/d"), "qcow2", writable=True)
    machine = Machine("qemu", "tcg", Path("k"), Path("i"), 256, 2, 7, 8, [disk], incoming=True)
    line = " ".join(machine.command())
    for part in ("-sandbox on,", "spawn=deny", "-nodefaults", "-incoming defer -S", "share=off", "q35,hpet=on"):
        assert part in line
    assert "-netdev" not in line
    file, top = (json.loads(part) for part in machine.command() if part.startswith('{"driver"'))
    written = {"read-only": False, "discard": "unmap"}
    assert {"driver": "file", "filename": "/vm/d", **written}.items() <= file.items()
    assert {"driver": "qcow2", "node-name": "disk", "detect-zeroes": "unmap", **written}.items() <= top.items()
    assert top["file"] == file["node-name"]
    quick = Machine("qemu", "kvm", Path("k"), Path("i"), 256, 1, 7, 8, [disk]).command()
    assert any(part.startswith("microvm,") for part in quick)
    assert any(part.startswith("virtio-blk-device,") for part in quick)


def test_images_of_layers_that_are_gone_go_too(tmp_path: Path) -> None:
    images, layer = tmp_path / "images", tmp_path / "layer"
    images.mkdir()
    layer.mkdir()
    records = {"used": [layer], "gone": [layer, tmp_path / "nothing"]}
    for name, layers in records.items():
        (images / f"{name}.img").touch()
        (images / f"{name}.json").write_text(json.dumps([str(path) for path in layers]))
    for name in ("blank-64.img", ".other.making", "unknown.img", "half.img"):
        (images / name).touch()
    (images / "half.json").write_text("[")
    sweep(images)
    assert sorted(path.name for path in images.iterdir()) == [".other.making", "blank-64.img", "used.img", "used.json"]
