"""What an image of memory says of itself and covers, without booting a guest."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.deltas import Delta, write_delta
from sandyard.runtimes.microvm import conf, disk, shortening
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import image, suspended
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.checking import Checker, digest_file, digest_ram, seal
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.fitting import load_fit, save_fit
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.suspended import Suspended
from sandyard.runtimes.microvm.memory.suspending import Suspending
from sandyard.runtimes.microvm.record import save_below
from tests.yard import needs_qemu

FIT = Fit("tcg", "q35", "max", "7.2", "6.1", 1, 4, 16, False, "image", [])
IDLE = cast(Compactor, SimpleNamespace(leave=AsyncMock(), soon=Mock()))
SPEC = SandboxSpec("one", Rootfs([]), Resources(disk_mb=16), hostname="box")


class Still(Host):
    """A host on which nothing runs."""

    async def end(self, sandbox_id: str) -> None:
        shutil.rmtree(self.layout.home(sandbox_id), ignore_errors=True)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Still(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    layout = made.layout
    for path in (layout.home("one"), layout.memory("one"), layout.disk("one"), layout.images, layout.keeps):
        path.mkdir(parents=True)
    made.layout.block("one").write_bytes(b"block image")
    return made


def written(name: Path) -> Manifest:
    """An image with one delta, but for its manifest and its layer."""
    ram, state, pages = part(name, "ram"), part(name, "state"), part(name, "pages0")
    ram.write_bytes(os.urandom(1 << 20) + bytes(3 << 20))
    state.write_bytes(b"devices")
    part(name, "base").write_bytes(b"block image")
    write_delta(pages, [(3, os.urandom(PAGE))], block_size=PAGE, size=4 << 20, parent="pages0", durable=False)
    with Delta(pages) as delta:
        digest = delta.digest.hex()
    return Manifest(FIT, "box", 4096, digest_file(state), digest_ram(ram), [digest])


def sealed(name: Path) -> Manifest:
    manifest = written(name)
    name.write_bytes(os.urandom(200_000))
    return seal(name, manifest, durable=False)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        _flip,
        lambda path: os.truncate(path, 199_999),
        lambda path: os.truncate(path, 200_001),
        lambda path: path.write_bytes(os.urandom(200_000)),
    ],
    ids=["flipped", "cut", "longer", "exchanged"],
)
def test_the_layer_is_covered(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    name, checker = tmp_path / "one", Checker()
    manifest = sealed(name)
    assert image.load(name) == manifest
    checker.check(name, manifest)
    harm(name)
    with pytest.raises(Unfit, match="one, of the disk that its memory goes with, is not what was written"):
        checker.check(name, manifest)
    name.unlink()
    with pytest.raises(Unfit, match="one is gone"):
        checker.check(name, manifest)


@needs_qemu
def test_memory_of_another_version_leaves_its_files(tmp_path: Path) -> None:
    """Whatever else is otherwise, the files of a disk are found."""
    name = tmp_path / "one"
    below, blank = part(name, "disk0"), part(name, "blank")
    for path in (name, below):
        disk.run(["qemu-img", "create", "-q", "-f", "qcow2", str(path), "1M"])
    blank.write_bytes(bytes(1 << 20))
    for record, found in (
        ({**asdict(written(name)), "disk": "of its layer"}, [name]),
        ({"format": 99, "disks": ["a", "b"], "blank": "c"}, [blank, below, name]),
    ):
        content = json.dumps({"format": 1, **record}).encode()
        part(name, "memory").write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        with pytest.raises(Unfit, match="another version"):
            image.load(name)
        assert image.chain_of(name) == found
    below.unlink()
    with pytest.raises(Unfit, match=r"one is not whole: one.disk0 is gone"):
        image.chain_of(name)


def test_a_guest_goes_on_whatever_boots_now(tmp_path: Path) -> None:
    """Its kernel and its agent are in its memory: that those are others here says nothing, but how they speak does."""
    replace(FIT, kernel="5.10 another").check(FIT, tmp_path)
    with pytest.raises(Unfit, match="taken with another protocol of the agent: 1, here it is 2"):
        FIT.check(replace(FIT, protocol=2), tmp_path)
    for each in fields(Fit):
        if each.name != "kernel":
            with pytest.raises(Unfit, match=r"was taken with another .*: other, here it is"):
                Fit(**{**asdict(FIT), each.name: "other"}).check(FIT, tmp_path)


def test_memory_of_the_format_before_is_of_the_first_protocol(tmp_path: Path) -> None:
    name = tmp_path / "one"
    manifest = sealed(name)
    record = {"format": 2, **asdict(manifest)}
    del record["fit"]["protocol"]
    content = json.dumps(record).encode()
    part(name, "memory").write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    assert image.load(name) == manifest
    assert manifest.fit.protocol == 1


def test_a_half_goes_with_its_layer(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    sealed(whole)
    written(half)
    half.touch()
    before = {path.name for path in tmp_path.glob("whole*")}
    for name in (whole, half):
        image.remove_half(name)
    assert {path.name for path in tmp_path.iterdir()} == before


def _instance() -> MicroVMInstance:
    return cast(MicroVMInstance, SimpleNamespace(spec=SPEC, pid=os.getpid()))


async def test_memory_is_recorded_as_of_what_its_vmm_was_made_on(host: Host, tmp_path: Path) -> None:
    home, name = host.layout.home("one"), tmp_path / "image"
    with pytest.raises(SandboxError, match="not known what sandbox one was made on: its memory cannot be taken"):
        await Capture.prepare(host, _instance(), name)
    (home / "fit.json").write_text('{"accel": "tcg", "strange": 1}')
    with pytest.raises(SandboxError, match="not known what sandbox one was made on"):
        await Capture.prepare(host, _instance(), name)
    save_fit(home, FIT)
    assert load_fit(home) == FIT
    save_below(home, "")
    part(name, "ram").write_bytes(bytes(4 << 20))
    part(name, "state").write_bytes(b"devices")
    capture = await Capture.prepare(host, _instance(), name)
    assert capture.write("box", 4096, durable=False).fit == FIT  # of no QEMU, kernel or size that is here now
    assert not image.exists(name)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes that were brought to the disk."""
    found: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: found.add(os.fstat(descriptor).st_ino))
    return found


@pytest.mark.parametrize("durable", [True, False])
async def test_what_is_to_last_is_synced_with_all_it_shares(
    host: Host, tmp_path: Path, synced: set[int], durable: bool
) -> None:
    below, name = host.layout.memory("one") / "0", tmp_path / "image"
    image.save(below, written(below), durable=False)  # as a fork leaves it
    save_fit(host.layout.home("one"), FIT)
    save_below(host.layout.home("one"), "0")
    part(name, "state").write_bytes(b"devices")
    part(name, "pages.draft").touch()
    capture = await Capture.prepare(host, _instance(), name)
    manifest = capture.write("box", 4096, durable=durable)
    image.save(name, manifest, durable=durable)
    files = (*image.parts_of(name, manifest), part(name, "memory"), tmp_path)
    parts = {path.name: path.stat().st_ino for path in files}
    assert set(parts) == {
        "image.ram",
        "image.base",
        "image.state",
        "image.pages0",
        "image.pages1",
        "image.memory",
        tmp_path.name,
    }
    assert set(parts.values()) <= synced if durable else not synced


def _asleep(host: Host) -> Suspended:
    """With a disk of two images, of which a snapshot has the lower one."""
    name, disks = host.layout.memory("one") / "0", Disks(host.layout, SPEC)
    image.save(name, written(name), durable=False)
    disks.add()
    disks.keep(0, ended=True)
    disks.add()
    for other in ("snapshot", "another"):
        os.link(disks.kept / disk.image(0), disks.kept.parent / other)
    record = Suspended(SPEC, "0", 1)
    suspended.save(host.layout, record)
    return record


@needs_qemu
@pytest.mark.root
async def test_a_copy_of_a_suspended_one_is_counted_and_covered(host: Host, tmp_path: Path) -> None:
    record, target = _asleep(host), tmp_path / "copy"
    suspending = Suspending(host, cast(Restorer, None), IDLE)
    os.link(host.layout.memory("one") / "0.ram", tmp_path / "base.ram")  # that of a base, as nearly always
    size = await suspending.commit(record, target)
    own = [target, *(part(target, what) for what in ("state", "pages0", "base", "memory"))]
    assert size == sum(path.stat().st_blocks * 512 for path in own)
    rest = [target, part(target, "memory")]
    assert image.taken(target) == sum(path.stat().st_blocks * 512 for path in rest)  # all else has its other name
    manifest = image.load(target)
    assert (len(manifest.disks), bool(manifest.blank)) == (2, True)
    Checker().check(target, manifest)
    assert Disks(host.layout, SPEC).depth() == 2  # as before, and nothing to be written to
    with pytest.raises(SandboxError, match="it is there already"):
        await suspending.commit(record, target)
    assert image.load(target) == manifest


@needs_qemu
@pytest.mark.root
async def test_a_copy_that_fails_leaves_nothing(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, target = _asleep(host), tmp_path / "layers" / "copy"
    target.parent.mkdir()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image, "save", full)
    with pytest.raises(SandboxError, match="No space left"):
        await Suspending(host, cast(Restorer, None), IDLE).commit(record, target)
    assert list(target.parent.iterdir()) == []


class _Waking:
    """Starts a guest that needs no VMM."""

    frozen = False

    async def fitting(self, choice: Choice, spec: SandboxSpec, name: Path) -> Manifest:
        return image.load(name)

    async def start(self, choice: Choice, spec: SandboxSpec, name: Path, manifest: Manifest) -> MicroVMInstance:
        return cast(MicroVMInstance, self)

    async def thaw(self) -> None:
        assert self.frozen


@pytest.fixture
def asleep(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    _asleep(host)

    async def shallow(*_: object) -> None:
        """What a guest is asked for then."""

    monkeypatch.setattr(shortening, "begin", shallow)


@needs_qemu
@pytest.mark.root
@pytest.mark.usefixtures("asleep")
@pytest.mark.parametrize("fails", [False, True])
async def test_that_one_was_woken_is_on_the_disk(host: Host, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    home = host.layout.memory("one")
    records: list[bool] = []

    def sync(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == home.stat().st_ino:
            records.append((home / "suspended.json").exists())
            if fails:
                raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", sync)
    waking = _Waking()
    woken = await Suspending(host, cast(Restorer, waking), IDLE).wake(cast(Choice, None), SPEC)
    assert woken is cast(MicroVMInstance, waking)
    assert records == [False]  # brought there once it was gone; that it cannot be is no reason to end it
    assert suspended.ids(host.layout) == []


@needs_qemu
@pytest.mark.root
@pytest.mark.usefixtures("asleep")
async def test_a_wake_that_is_called_off_at_its_end_leaves_it_suspended(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, loop = suspended.forget, asyncio.get_running_loop()
    waking = asyncio.ensure_future(
        Suspending(host, cast(Restorer, _Waking()), IDLE).wake(cast(Choice, None), SPEC),
    )

    def called_off(layout: Layout, sandbox_id: str) -> None:
        forget(layout, sandbox_id)
        loop.call_soon_threadsafe(waking.cancel)

    monkeypatch.setattr(suspended, "forget", called_off)
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert suspended.ids(host.layout) == ["one"]
    assert suspended.load(host.layout, "one") == Suspended(SPEC, "0", 1)
    assert Disks(host.layout, SPEC).top() == 2  # what a wake that follows removes


def test_the_disk_of_a_configuration_is_of_no_size_a_vmm_says(tmp_path: Path) -> None:
    path = tmp_path / "conf.img"
    path.write_bytes(conf.configuration(SPEC, 0, Settings().network.subnet, used=False))
    assert conf.bytes_of(path) == 4096
    os.truncate(path, 1 << 40)
    assert conf.bytes_of(path) == conf.DISK_MAX
    path.unlink()
    (tmp_path / "big").write_bytes(bytes(100_000))
    path.symlink_to(tmp_path / "big")
    assert conf.bytes_of(path) < 4096
