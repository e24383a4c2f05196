"""Images that strangers wrote to get at what is not theirs, or to fill what is everyone's."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandyard.config import ImageSettings, PathSettings, Settings
from sandyard.errors import BadRequest, SandyardError
from sandyard.images.oci.base import digest_of
from sandyard.images.oci.holds import guard, hold, read_holds
from sandyard.images.oci.layers import LayerStore
from sandyard.images.oci.manifest import choose, parse_config, parse_descriptor
from sandyard.images.oci.pull import Image, needs, pull
from sandyard.images.oci.room import NoRoom
from sandyard.images.oci.unpack import unpack_layer
from sandyard.images.tarball import parts_of
from tests.images import oci
from tests.images.oci import Entry, folder, image, layer

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
MIB = 1 << 20
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    paths = PathSettings(state=tmp_path / "state", run=tmp_path / "run")
    return Settings(paths=paths, images=ImageSettings(store_high_mb=64, store_low_mb=32))


@pytest.mark.parametrize("name", ["sha256:../../proc/1/root", "sha256:" + "A" * 64, "sha256:" + "a" * 63, "sha256:"])
def test_a_layer_is_named_by_a_digest_and_nothing_else(name: str, settings: Settings) -> None:
    with pytest.raises(BadRequest):
        parse_config({"rootfs": {"diff_ids": [name]}}, "image")
    with pytest.raises(BadRequest):
        parse_descriptor({"digest": name, "size": 1}, "image")
    assert LayerStore(settings).find([name]) is None


def test_a_layer_that_says_it_is_another_is_none(settings: Settings) -> None:
    home = LayerStore(settings).home / ("b" * 64)
    home.mkdir(parents=True)
    (home / "layer.json").write_text(json.dumps({"key": "c" * 64, "diff_id": f"sha256:{'b' * 64}", "size_bytes": 1}))
    assert LayerStore(settings).find([f"sha256:{'b' * 64}"]) is None


@pytest.mark.parametrize("size", [-1, 1 << 60, True, 1.5, "1"])
def test_a_size_is_a_number_that_can_be(size: object) -> None:
    with pytest.raises(BadRequest):
        parse_descriptor({"digest": DIGEST, "size": size}, "image")


@pytest.mark.parametrize(
    "read",
    [
        lambda: choose({"manifests": None}, "linux/amd64", "image"),
        lambda: choose({"manifests": ["x"]}, "linux/amd64", "image"),
        lambda: choose({"manifests": [{"platform": "x"}]}, "linux/amd64", "image"),
        lambda: parse_config({"rootfs": [1]}, "image"),
        lambda: parse_config({"rootfs": {"diff_ids": [DIGEST]}, "config": {"Env": [1]}}, "image"),
        lambda: parse_config({"rootfs": {"diff_ids": [DIGEST]}, "config": {"ExposedPorts": 5}}, "image"),
    ],
)
def test_what_is_not_of_its_type_is_no_image(read: Callable[[], Any]) -> None:
    with pytest.raises(BadRequest, match="image"):
        read()


async def _pull(settings: Settings, layout: Path, owner: str | None) -> Image:
    async with needs(settings) as given:
        return await pull(settings, f"oci:{layout}", given=replace(given, owner=owner))


@root_only
async def test_a_digest_does_not_give_a_tenant_what_another_pulled(settings: Settings, tmp_path: Path) -> None:
    secret = image([layer(folder("etc"), Entry("etc/secret", b"of tenant a"))])
    layout = oci.write_layout(tmp_path / "layout", secret)
    first = await _pull(settings, layout, "a")
    blob = layout / "blobs" / "sha256" / secret.layers[0].partition(":")[2]
    kept = blob.read_bytes()
    blob.unlink()  # who names it has not got it
    assert (await _pull(settings, layout, "a")).trees == first.trees
    with pytest.raises(SandyardError):
        await _pull(settings, layout, "b")
    blob.write_bytes(kept)
    assert (await _pull(settings, layout, "b")).trees == first.trees  # one copy, and both have it now
    blob.unlink()
    assert (await _pull(settings, layout, "b")).trees == first.trees


@root_only
async def test_what_the_node_pulled_is_everyones(settings: Settings, tmp_path: Path) -> None:
    layout = oci.write_layout(tmp_path / "layout", image([layer(folder("etc"))]))
    await _pull(settings, layout, None)
    for blob in (layout / "blobs" / "sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.unlink()
    await _pull(settings, layout, "a")


def test_paths_are_of_a_depth_that_can_be_walked() -> None:
    assert len(parts_of("a/" * 100)) == 100
    with pytest.raises(BadRequest, match="deep"):
        parts_of("a/" * 1500)
    with pytest.raises(BadRequest, match="too long"):
        parts_of("b" * 5000)


def _links(target: str, names: list[str]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.LNKTYPE, target
            tar.addfile(member)
    packed.seek(0)
    return packed


@root_only
def test_links_to_lower_layers_count_as_what_is_copied(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "big").write_bytes(os.urandom(MIB))
    for number in range(8):
        os.link(below / "big", below / f"big{number}")
    heard: list[int] = []
    made = unpack_layer(_links("big", ["one"]), tmp_path / "fine", 100000, 2 * MIB, [below], heard.append)
    assert (made.size_bytes, sum(heard) >= MIB) == (MIB, True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number in range(8):
            member = tarfile.TarInfo(f"copy{number}")
            member.type, member.linkname = tarfile.LNKTYPE, f"big{number}"
            tar.addfile(member)
    packed.seek(0)
    with pytest.raises(BadRequest, match="links to files of lower layers pass the limit"):
        unpack_layer(packed, tmp_path / "bomb", 100000, 2 * MIB, [below])


@root_only
async def test_a_size_that_is_only_claimed_removes_nothing(settings: Settings, tmp_path: Path) -> None:
    layout = oci.write_layout(tmp_path / "layout", image([layer(folder("etc"))]))
    index = json.loads((layout / "index.json").read_text())
    where = layout / "blobs" / "sha256"
    path = where / index["manifests"][0]["digest"].partition(":")[2]
    manifest = json.loads(path.read_text())
    manifest["layers"][0]["size"] = 1 << 43
    data = json.dumps(manifest).encode()
    path = where / digest_of(data).partition(":")[2]
    path.write_bytes(data)
    index["manifests"][0] |= {"digest": digest_of(data), "size": len(data)}
    (layout / "index.json").write_text(json.dumps(index))
    asked: list[int] = []
    async with needs(settings, asked.append) as given:
        with pytest.raises(NoRoom, match="may take at all"):
            await pull(settings, f"oci:{layout}", given=given)
        with guard(LayerStore(settings).home, exclusive=True):
            assert read_holds(LayerStore(settings).home).bytes == 0
    assert asked == []


@root_only
async def test_what_a_pull_reserved_is_free_when_it_failed(settings: Settings, tmp_path: Path) -> None:
    layout = oci.write_layout(tmp_path / "layout", image([layer(folder("x"), Entry("x/y", os.urandom(12 * MIB)))]))
    blob = max((layout / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    async with needs(settings) as given:
        with pytest.raises(SandyardError):
            await pull(settings, f"oci:{layout}", given=given)
        with guard(LayerStore(settings).home, exclusive=True):
            assert read_holds(LayerStore(settings).home).bytes == 0


def test_a_hold_that_was_cut_lets_nothing_go(tmp_path: Path) -> None:
    with hold(tmp_path) as held:
        held.reserve(5)
        (path,) = (tmp_path / ".holds").iterdir()
        path.write_bytes(b'{"keys": [')
        with guard(tmp_path, exclusive=True), pytest.raises(SandyardError, match="is damaged"):
            read_holds(tmp_path)
