"""What snapshots hold of the host's disk together, without a guest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import bases, image
from sandyard.runtimes.microvm.memory.holding import held_bytes
from sandyard.runtimes.microvm.memory.image import part

KIB = 1 << 10


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout.of(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    for path in (made.images, made.bases / "kind", made.memory("one"), tmp_path / "layers"):
        path.mkdir(parents=True)
    base = made.bases / "kind" / "base"
    put(base, 64)
    put(part(base, "ram"), 512)
    put(part(base, "memory"), 4)
    put(made.images / "block.img", 256)
    return made


def put(path: Path, kib: int) -> None:
    path.write_bytes(os.urandom(kib * KIB))


def suspended(layout: Layout) -> Path:
    """The image of one that is suspended, and its block image."""
    name = layout.memory("one") / "0"
    os.link(layout.bases / "kind" / "base.ram", part(name, "ram"))
    os.link(layout.images / "block.img", part(name, "base"))
    put(part(name, "pages0"), 128)
    put(part(name, "state"), 32)
    put(part(name, "memory"), 4)
    return name


def copied(name: Path, layer: Path) -> Path:
    """A snapshot of it, with a layer of its own."""
    put(layer, 100)
    for what in ("ram", "base", "pages0", "state"):
        os.link(part(name, what), part(layer, what))
    put(part(layer, "memory"), 4)
    return layer


def test_what_snapshots_share_counts_once_and_stays_counted(layout: Layout, tmp_path: Path) -> None:
    name = suspended(layout)
    first = copied(name, tmp_path / "layers" / "first")
    one = (100 + 128 + 32 + 4) * KIB
    assert held_bytes(layout, [first], []) == one
    second = copied(name, tmp_path / "layers" / "second.of.it")
    copied(name, tmp_path / "layers" / "firstborn")  # nobody's
    assert held_bytes(layout, [first, second], []) == one + (100 + 4) * KIB
    image.remove(first)
    first.unlink()
    assert held_bytes(layout, [second], []) == one, "it holds all of it now"
    image.remove(name)
    assert held_bytes(layout, [second, first], []) == one


def test_what_a_template_or_everybody_has_is_not_a_snapshots(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = suspended(layout)
    template = copied(name, tmp_path / "layers" / "template")
    mine = copied(template, tmp_path / "layers" / "mine")
    assert held_bytes(layout, [mine], [template]) == (100 + 4) * KIB
    assert held_bytes(layout, [mine], []) == (100 + 128 + 32 + 4) * KIB
    monkeypatch.setattr("sandyard.runtimes.microvm.memory.holding.KEPT", 0)  # its base stays for it alone
    assert held_bytes(layout, [mine], []) == (100 + 128 + 32 + 4 + 512) * KIB
    monkeypatch.undo()
    assert bases.KEPT > 0
    part(layout.bases / "kind" / "base", "memory").unlink()
    assert held_bytes(layout, [mine], []) == (100 + 128 + 32 + 4 + 512) * KIB


def test_where_nothing_is_nothing_is_held(layout: Layout, tmp_path: Path) -> None:
    assert held_bytes(layout, [tmp_path / "none" / "layer", tmp_path / "layers"], [tmp_path / "away"]) == 0
