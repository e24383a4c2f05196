"""`store verify`: what is whole is found whole, and each kind of damage is found."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sandyard.cli import main
from sandyard.config import Settings
from sandyard.images.garbage.base import Finding, check_all, set_aside
from sandyard.images.garbage.checks import LayersOfImages, NodeTemplates
from sandyard.images.oci.layers import LayerStore
from sandyard.images.pulled import pull_template
from sandyard.images.templates import TemplateStore
from sandyard.runtimes.deltas import write_delta
from sandyard.sandboxes.storage.checks import BuildCache, CommittedLayers, Foundations
from sandyard.sandboxes.storage.references import References
from tests.images.oci import Entry, folder, layer
from tests.images.store.conftest import MIB, MakeSettings, layout, random_layer
from tests.server.conftest import memory_settings, running

pytestmark = pytest.mark.root


def damaged(settings: Settings, *, deep: bool) -> list[Finding]:
    found = check_all([LayersOfImages(settings), NodeTemplates(settings)], deep=deep)
    assert not [each for checkup in found for each in checkup.orphans]
    return [each for checkup in found for each in checkup.damaged]


def _flip(tree: Path) -> None:
    file = tree / "a/0"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(tree: Path) -> None:
    os.truncate(tree / "a/0", 10)


def _rename(tree: Path) -> None:
    (tree / "a/0").rename(tree / "a/zero")


def _mode(tree: Path) -> None:
    (tree / "a/0").chmod(0o4755)


def _record(tree: Path) -> None:
    (tree.parent / "layer.json").write_text("{")


def _attribute(tree: Path) -> None:
    os.setxattr(tree / "a", "trusted.overlay.opaque", b"y")


def _index(tree: Path) -> None:
    os.truncate(tree.parent / "files.idx", 20)


@pytest.mark.parametrize(
    ("harm", "only_deep", "said"),
    [
        (_flip, True, "content is"),
        (_cut, False, "size is 10"),
        (_rename, False, "was not there"),
        (_mode, False, "mode is"),
        (_record, False, "layer.json is missing, damaged or another"),
        (_attribute, True, "attributes is"),
        (_index, False, "cannot be compared"),
        (lambda tree: shutil.rmtree(tree), False, "files are missing"),
    ],
)
async def test_damage_of_a_layer(
    harm: Callable[[Path], None], only_deep: bool, said: str, make: MakeSettings, tmp_path: Path
) -> None:
    settings = make()
    source = layout(tmp_path / "image", random_layer("a", MIB))
    made = await pull_template(settings, source, "tool")
    assert damaged(settings, deep=True) == []
    harm(made.rootfs.layers[0])
    assert (damaged(settings, deep=False) == []) is only_deep
    found = damaged(settings, deep=True)
    assert said in " ".join(each.problem for each in found)
    for each in found:
        set_aside(each, settings.paths.state / "damaged")
    await pull_template(settings, source, "tool")
    assert damaged(settings, deep=True) == []
    assert TemplateStore(settings).get("tool").rootfs.layers == made.rootfs.layers


async def test_damage_of_a_template(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    whole = await pull_template(settings, layout(tmp_path / "image", layer(folder("a"), Entry("a/b"))), "tool")
    record = settings.paths.state / "templates/tool/template.json"
    text = record.read_text()
    record.write_text(text[:-10])
    assert [each.name for each in damaged(settings, deep=False)] == ["tool"]
    record.write_text(text)
    shutil.rmtree(whole.rootfs.layers[0].parent)
    assert "is not there" in damaged(settings, deep=False)[0].problem


async def test_what_killed_processes_left_is_listed_and_goes(make: MakeSettings, tmp_path: Path) -> None:
    settings = make()
    await pull_template(settings, layout(tmp_path / "image", random_layer("a", MIB)), "tool")
    store = LayerStore(settings)
    for path in (
        store.home / ".making-x",
        settings.paths.state / "downloads/x",
        TemplateStore(settings).home / ".building-x",
    ):
        path.mkdir()
    found = check_all([LayersOfImages(settings), NodeTemplates(settings)], deep=False)
    assert sorted(each.name for checkup in found for each in checkup.orphans) == [".building-x", ".making-x", "x"]


def test_layers_of_snapshots(tmp_path: Path) -> None:
    home = tmp_path / "layers"
    home.mkdir()
    image, delta, foreign = home / "image", home / "delta", home / "foreign"
    with image.open("wb") as file:
        file.truncate(8 * MIB)
    subprocess.run(["/usr/sbin/mke2fs", "-q", "-t", "ext4", image], check=True)
    write_delta(
        delta.with_name("delta.delta"), [(3, b"x" * 4096)], block_size=4096, size=8 * MIB, parent="image", durable=False
    )
    known = References({image: "snapshot a", delta: "snapshot b"}, {})
    check = CommittedLayers(home, known, set())
    assert (check.check(deep=True).damaged, check.check(deep=True).orphans) == ([], [])
    assert [
        each.name for each in CommittedLayers(home, References({delta: "b"}, {}), set()).check(deep=True).orphans
    ] == []
    foreign.write_bytes(b"")
    assert [each.name for each in check.check(deep=False).orphans] == ["foreign"]
    os.truncate(image, 4 * MIB)
    assert "it is cut" in check.check(deep=False).damaged[0].problem
    data = bytearray(delta.with_name("delta.delta").read_bytes())
    data[data.index(b"xxxx") + 5] ^= 1
    delta.with_name("delta.delta").write_bytes(data)
    assert "are not what was written" in " ".join(each.problem for each in check.check(deep=True).damaged)
    image.unlink()
    assert {each.name for each in check.check(deep=False).damaged} == {"image", "delta"}


def test_a_layer_on_its_way_that_nobody_brings_is_damaged(tmp_path: Path) -> None:
    home, orders = tmp_path / "layers", tmp_path / "blobs" / "lazy"
    for each in (home, orders):
        each.mkdir(parents=True)
    (home / "coming").symlink_to(tmp_path / "nothing")
    check = CommittedLayers(home, References({home / "coming": "snapshot a"}, {}), set())
    (finding,) = check.check(deep=False).damaged
    assert "nobody brings it" in finding.problem
    (orders / "coming").write_text("{}")
    found = check.check(deep=False)
    assert (found.damaged, found.unknown, found.count) == ([], 1, 1)


def test_the_build_cache_and_what_is_stood_on(tmp_path: Path) -> None:
    index = tmp_path / "cache.json"
    assert BuildCache(index).check(deep=False).count == 0
    index.write_text(json.dumps({"key": {"layers": [str(tmp_path / "gone")]}}))
    found = BuildCache(index).check(deep=False)
    assert (found.damaged, len(found.orphans)) == ([], 1)
    index.write_text("{")
    assert len(BuildCache(index).check(deep=False).damaged) == 1
    known = References({tmp_path / "gone": "template x"}, {tmp_path: "sandbox y"})
    assert [each.problem for each in Foundations(tmp_path / "layers", known).check(deep=False).damaged] == [
        "is missing, for template x"
    ]


# --- the command ---


def command(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    """In this process: another one would take a second or two to load what it needs."""
    out, err, status = StringIO(), StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("SANDYARD_PATHS__STATE", str(settings.paths.state))
        patch.setenv("SANDYARD_PATHS__RUN", str(settings.paths.run))
        patch.setattr(sys, "argv", ["sandyard", *words])
        try:
            main()
        except SystemExit as ending:
            status = int(ending.code or 0)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("served", [False, True], ids=["alone", "through a server"])
def test_the_commands(served: bool, tmp_path: Path) -> None:
    settings = memory_settings(tmp_path)
    pulled = command(settings, "pull", layout(tmp_path / "image", random_layer("a", MIB)), "--name", "tool")
    assert pulled.returncode == 0, pulled.stderr

    def look() -> None:
        told = command(settings, "store", "gc", "--dry-run")
        assert json.loads(told.stdout)[0]["verdict"] == "stays: template tool"
        TemplateStore(settings).delete("tool")
        assert command(settings, "store", "verify", "--deep").returncode == 0
        assert json.loads(command(settings, "store", "gc").stdout) == []  # there is room
        assert json.loads(command(settings, "store", "gc", "--all").stdout)[0]["verdict"] == "gone"
        assert LayerStore(settings).all() == []
        command(settings, "pull", layout(tmp_path / "other", random_layer("b", MIB)), "--name", "tool")
        _cut_b(LayerStore(settings).all()[0].tree)
        broken = command(settings, "store", "verify")
        assert (broken.returncode, json.loads(broken.stdout)[0]["state"]) == (1, "damaged")
        assert command(settings, "store", "verify", "--repair").returncode == 1
        assert LayerStore(settings).all() == []
        kinds = {use["kind"] for use in json.loads(command(settings, "store", "df").stdout)}
        assert "set aside by verify --repair" in kinds

    if not served:
        look()
        return
    with running(settings) as live:
        # What a server in a process of its own says of itself.
        (settings.paths.state / "server.lock").write_text(json.dumps({"pid": os.getpid(), "url": live.url}))
        with open(settings.paths.state / "server.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with capture_logs():  # the server's, which would be among what the commands print
                look()
            with live.client(live.call(live.app_keys().issue("another"))) as stranger:
                assert stranger.post("/store/gc", json={}).status_code == 403
                assert stranger.get("/store").status_code == 403


def _cut_b(tree: Path) -> None:
    os.truncate(tree / "b/0", 10)
