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


def as_before(layer: Path) -> Path:
    """With a manifest that does not cover the disk."""
    image.save(layer, replace(image.load(layer), disk=""), durable=False)
    return layer


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
        (lambda layer: os.truncate(as_before(layer), 200_000), "qemu-img check"),
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
