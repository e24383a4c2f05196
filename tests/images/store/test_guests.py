"""Checks of layers that microVMs wrote: a disk by its tables, memory by its digests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.images.garbage.base import Checkup
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.memory import checking as digests
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.image import Fit, Manifest
from sandyard.sandboxes.storage.checks import CommittedLayers
from sandyard.sandboxes.storage.references import References

pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="this host has no qemu-img")
FIT = Fit("tcg", "q35", "max", "7.2", "6.1", 1, 4, 16, False, "image", [])


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    path, raw = tmp_path / "layers" / "one", tmp_path / "raw"
    path.parent.mkdir()
    raw.write_bytes(os.urandom(1 << 20))
    subprocess.run(["qemu-img", "convert", "-q", "-f", "raw", "-O", "qcow2", str(raw), str(path)], check=True)
    ram, state = image.part(path, "ram"), image.part(path, "state")
    ram.write_bytes(os.urandom(1 << 20) + bytes(3 << 20))
    state.write_bytes(b"devices")
    made = Manifest(FIT, "box", 0, digests.digest_file(state), digests.digest_ram(ram), [])
    digests.seal(path, made, durable=False)
    return path


def look(layer: Path, *, deep: bool = True) -> Checkup:
    return CommittedLayers(layer.parent, References({layer: "a snapshot"}, {}), set()).check(deep=deep)


def test_one_that_is_whole(layer: Path) -> None:
    found = look(layer)
    assert (found.count, found.damaged, found.orphans) == (1, [], [])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_files(layer: Path) -> Path:
    """Without memory, whose manifest covers the disk."""
    image.part(layer, "memory").unlink()
    return layer


def grown(layer: Path) -> Path:
    """With two images below the layer, and a blank one below those."""
    image.part(layer, "blank").write_bytes(bytes(1 << 20))
    for number in range(2):
        path, below = image.part(layer, f"disk{number}"), f"disk{number - 1}.qcow2" if number else "blank.img"
        names = ("-b", below, "-F", "qcow2" if number else "raw")  # those that a sandbox has: nothing has them here
        subprocess.run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", *names, str(path), "1M"], check=True)
    files = image.disks_of(layer, 3, blank=True)
    blank, *disks = [disk.digest(path) for path in files]
    image.save(layer, replace(image.load(layer), disks=disks, blank=blank), durable=False)
    return layer


def test_a_chain_that_is_whole(layer: Path) -> None:
    found = look(grown(layer))
    assert (found.count, found.damaged, found.orphans) == (1, [], [])


@pytest.mark.parametrize(
    ("what", "harm", "words"),
    [
        ("disk0", lambda path: flip(path, path.stat().st_size // 2), "one.disk0, of the disk"),
        ("disk1", lambda path: os.truncate(path, path.stat().st_size // 2), "one.disk1, of the disk"),
        ("blank", lambda path: path.write_bytes(b"x"), "one.blank, of the disk"),
        ("disk0", lambda path: path.unlink(), "one.disk0 is gone"),
    ],
)
def test_a_chain_that_is_not(what: str, harm: Callable[[Path], None], words: str, layer: Path) -> None:
    harm(image.part(grown(layer), what))
    (found,) = look(layer).damaged
    assert words in found.problem


def test_an_image_below_that_is_gone_is_seen_without_reading(layer: Path) -> None:
    image.part(grown(layer), "disk1").unlink()
    (found,) = look(layer, deep=False).damaged
    assert "one.disk1 is gone" in found.problem


def test_a_header_that_names_a_file_is_not_followed(layer: Path, tmp_path: Path) -> None:
    """The check of the tables reads the image alone."""
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(1 << 20))
    of_files(layer).unlink()
    options = f"data_file={victim},data_file_raw=on"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, str(layer), "1M"], check=True)
    (found,) = look(layer).damaged
    assert "has what no image of a sandbox has" in found.problem


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda layer: flip(image.part(layer, "ram"), 70_000), "MiB 0 is not what was written"),
        (lambda layer: flip(image.part(layer, "state"), 3), "state is not what was written"),
        (lambda layer: flip(image.part(layer, "memory"), 90), "memory is not what was written"),
        (lambda layer: os.truncate(image.part(layer, "ram"), 1 << 20), "bytes"),
        (lambda layer: image.part(layer, "ram").unlink(), "is gone"),
        (lambda layer: flip(layer, layer.stat().st_size // 2), "the disk that its memory goes with"),
        (lambda layer: os.truncate(layer, 200_000), "the disk that its memory goes with"),
        (lambda layer: os.truncate(of_files(layer), 200_000), "qemu-img check"),
    ],
)
def test_one_that_is_not(harm: Callable[[Path], None], words: str, layer: Path) -> None:
    harm(layer)
    (found,) = look(layer).damaged
    assert words in found.problem


def test_what_is_gone_is_seen_without_reading(layer: Path) -> None:
    image.part(layer, "state").unlink()
    (found,) = look(layer, deep=False).damaged
    assert "one.state is gone" in found.problem
