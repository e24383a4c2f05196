"""The layer store stays within its watermarks, and what is used stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import BadRequest, ConfigError, HostError
from sandyard.images.garbage.base import check_all
from sandyard.images.garbage.checks import LayersOfImages, NodeTemplates
from sandyard.images.garbage.collect import AT_WORK, collect, node_templates
from sandyard.images.oci import room
from sandyard.images.oci.downloads import downloads_home
from sandyard.images.oci.holds import guard, read_holds
from sandyard.images.oci.layers import LayerStore
from sandyard.images.oci.pull import Needs, needs, pull
from sandyard.images.oci.room import NoRoom, Watermarks
from sandyard.images.pulled import pull_template
from sandyard.images.templates import TemplateStore
from tests.images.oci import image, write_layout
from tests.images.store.conftest import MIB, MakeSettings, bytes_below, layout, random_layer, unused_goes

pytestmark = pytest.mark.root


def clean(settings: Settings, *, deep: bool = True) -> bool:
    """Nothing is damaged, and nothing is left over."""
    found = check_all([LayersOfImages(settings), NodeTemplates(settings)], deep=deep)
    return not [each for checkup in found for each in (*checkup.damaged, *checkup.orphans)]


def aged(store: LayerStore) -> None:
    """Let the layers be unused for as long as they are old."""
    for age, kept in enumerate(reversed(store.all())):
        os.utime(kept.home / "layer.json", (1000 - age, 1000 - age))


async def test_the_longest_unused_goes_first_and_what_is_in_use_stays(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    for number in range(4):
        await pull(settings, layout(tmp_path / str(number), random_layer("a", MIB)))
    store = LayerStore(settings)
    aged(store)
    first, second, third, fourth = store.all()
    marks = settings.model_copy(update={"images": settings.images.model_copy(update={"store_high_mb": 4})})
    assert collect(settings, dict, dry_run=True).gone == []  # there is room
    told = collect(marks, lambda: {first.tree: "somebody"}, dry_run=True)
    roomy = "nobody uses it, and there is room"
    assert [verdict.why for verdict in told.verdicts] == ["somebody", "", roomy, roomy]
    assert store.all() == [first, second, third, fourth]  # it was only told
    assert collect(settings, lambda: {second.tree: "x"}, free=MIB // 2).gone == [first]
    assert collect(settings, lambda: {second.tree: "x"}, free=-1).gone == [third, fourth]
    assert store.all() == [second]


async def test_what_a_pull_holds_stays(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    source = layout(tmp_path / "image", random_layer("a", MIB))
    async with needs(settings) as given:
        held = await pull(settings, source, given=given)
        outcome = collect(settings, dict, free=-1)
        assert [(verdict.layer.key, verdict.why) for verdict in outcome.verdicts] == [(held.layers[0].key, AT_WORK)]
    assert len(collect(settings, dict, free=-1).gone) == 1


async def test_many_pulls_into_a_small_store(make: MakeSettings, tmp_path: Path) -> None:
    """100 MiB into 40: the store keeps within its mark at every step, a template's files stay as they are."""
    settings = make(store_high_mb=40, store_low_mb=30)
    store = LayerStore(settings)
    shared = random_layer("shared", 2 * MIB)
    kept = await pull_template(settings, layout(tmp_path / "kept", shared, random_layer("kept", 2 * MIB)), "kept")
    peak = 0

    def watch(*_: object) -> None:
        nonlocal peak
        peak = max(peak, bytes_below(store.home) + bytes_below(downloads_home(settings)))

    for number in range(12):
        home = tmp_path / "image"
        source = layout(home, shared, random_layer("a", 4 * MIB), random_layer("b", 4 * MIB))
        async with needs(settings, unused_goes(settings)) as given:
            pulled = await pull(settings, source, watch, given)
            assert all(tree.is_dir() for tree in pulled.trees)
        if number % 5 == 0:  # one by name, whose template is deleted
            await pull_template(settings, source, f"t{number}", watch, collect=unused_goes(settings))
            TemplateStore(settings).delete(f"t{number}")
        shutil.rmtree(home)
        watch()
    assert 20 * MIB < peak <= 40 * MIB
    assert all(tree.is_dir() for tree in kept.rootfs.layers)
    assert clean(settings)


async def test_what_cannot_fit_is_refused_before_it_fills_the_store(make: MakeSettings, tmp_path: Path) -> None:
    settings = make(store_high_mb=10, store_low_mb=10)
    await pull_template(settings, layout(tmp_path / "one", random_layer("a", 4 * MIB)), "one")
    with pytest.raises(NoRoom, match=r"more than the 10 MiB.* is in use.*images\.store_high_mb"):
        await pull_template(
            settings, layout(tmp_path / "two", random_layer("b", 4 * MIB)), "two", collect=unused_goes(settings)
        )
    assert [layer.tree for layer in LayerStore(settings).all()] == list(
        TemplateStore(settings).get("one").rootfs.layers
    )
    assert clean(settings)
    TemplateStore(settings).delete("one")
    await pull_template(
        settings, layout(tmp_path / "three", random_layer("b", 3 * MIB)), "two", collect=unused_goes(settings)
    )


async def test_the_last_of_the_disk_stays_free(
    make: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(NoRoom, match=r"MiB free, and .* MiB are needed"):
        await pull(make(store_high_mb=64), layout(tmp_path / "image", random_layer("a", 4 * MIB)))


def test_marks_are_by_the_disk_or_as_set(make: MakeSettings) -> None:
    whole = Watermarks.of(make())
    assert 0 < whole.low < whole.high < shutil.disk_usage("/tmp").total
    assert Watermarks.of(make(store_high_mb=10)) == Watermarks(8 * MIB, 10 * MIB)
    with pytest.raises(ValueError, match="store_low_mb is more"):
        make(store_high_mb=10, store_low_mb=11)
    assert issubclass(ConfigError, ValueError)


def test_the_hold_of_a_killed_process_is_none(make: MakeSettings) -> None:
    home = LayerStore(make()).home
    program = (
        "import os, sys; from pathlib import Path; from sandyard.images.oci.holds import guard, hold\n"
        "with hold(Path(sys.argv[1])) as held:\n"
        "    held.reserve(7)\n"
        "    with guard(Path(sys.argv[1])): held.add('key')\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with guard(home, exclusive=True):
            found = read_holds(home)
        assert (found.keys, found.bytes) == (frozenset({"key"}), 7)
        child.kill()
    with guard(home, exclusive=True):
        assert read_holds(home).keys == frozenset()
    assert list((home / ".holds").iterdir()) == []


# --- the disk is full ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 24 MiB."""
    image, mount = tmp_path / "disk", tmp_path / "mounted"
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    subprocess.run(["/usr/sbin/mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", image], check=True)
    mount.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.parametrize("size", [12, 40], ids=["in the unpacking", "in the download"])
async def test_a_full_disk_is_said_and_nothing_is_left(
    make: MakeSettings, small_disk: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make(small_disk / "state", store_high_mb=4096)
    monkeypatch.setattr(room, "RESERVE_BYTES", -(1 << 40))  # so that it is the disk that says no
    await pull_template(settings, layout(tmp_path / "small", random_layer("a", 2 * MIB)), "small")
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(HostError, match="No space left") as caught:
        await pull_template(settings, layout(tmp_path / "big", random_layer("b", size * MIB)), "big")
    assert not isinstance(caught.value, BadRequest)
    assert clean(settings)
    assert abs(shutil.disk_usage(small_disk).free - free) < MIB
    assert [template.name for template in TemplateStore(settings).list()] == ["small"]
    shutil.rmtree(tmp_path / "small")
    await pull_template(settings, layout(tmp_path / "small", random_layer("c", 2 * MIB)), "again")


async def test_a_pull_without_needs_takes_its_own(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    async with needs(settings) as given:
        assert isinstance(given, Needs)
        assert node_templates(settings) == {}
    await pull(settings, layout(tmp_path / "image", random_layer("a", MIB)))
    assert list((LayerStore(settings).home / ".holds").iterdir()) == []


async def test_a_digest_is_demanded(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    made = image([random_layer("a", MIB)], plain=True)
    source = f"oci:{write_layout(tmp_path / 'image', made)}"
    assert (await pull_template(settings, source, "tool", digest=made.manifest)).recipe == made.manifest
    other = f"sha256:{'0' * 64}"
    with pytest.raises(HostError, match="no manifest"):
        await pull_template(settings, source, "tool", digest=other)
    with pytest.raises(BadRequest, match="names another digest"):
        await pull_template(settings, f"{source}@{made.manifest}", "tool", digest=other)
    with pytest.raises(BadRequest, match="is not sha256"):
        await pull_template(settings, source, "tool", digest="latest")
    with pytest.raises(BadRequest, match="has no digest"):
        await pull_template(settings, "debootstrap:bookworm", "tool", digest=other)
    with pytest.raises(BadRequest, match="name one"):
        await pull_template(settings, "debootstrap:/etc", "tool")
    assert clean(settings)
