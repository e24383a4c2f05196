"""What an image of memory says of itself and covers, without booting a guest."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandyard.config import PathSettings, Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.deltas import Delta, write_delta
from sandyard.runtimes.microvm import commits, conf, disk
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import image, suspended
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.checking import Checker, digest_file, digest_ram, seal
from sandyard.runtimes.microvm.memory.fitting import load_fit, save_fit
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.pages import PAGE
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.suspended import Suspended
from sandyard.runtimes.microvm.memory.suspending import Suspending
from sandyard.runtimes.microvm.record import save_below

FIT = Fit("tcg", "q35", "max", "7.2", "6.1", 1, 4, 16, False, "image", [])
SPEC = SandboxSpec("one", Rootfs([]), hostname="box")


class Still(Host):
    """A host on which nothing runs."""

    async def end(self, sandbox_id: str) -> None:
        shutil.rmtree(self.layout.home(sandbox_id), ignore_errors=True)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Still(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    for path in (made.layout.home("one"), made.layout.memory("one"), made.layout.disk("one")):
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
    with pytest.raises(Unfit, match="one, the disk that its memory goes with, is not what was written"):
        checker.check(name, manifest)
    name.unlink()
    with pytest.raises(Unfit, match="one is gone"):
        checker.check(name, manifest)


def test_a_manifest_of_before_layers_were_covered(tmp_path: Path) -> None:
    name = tmp_path / "one"
    manifest = written(name)
    record = {"format": image.FORMAT, **asdict(manifest)}
    del record["disk"]
    content = json.dumps(record).encode()
    part(name, "memory").write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    assert image.load(name) == manifest
    Checker().check(name, image.load(name))


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
    assert capture.write("box", 4096, None, durable=False).fit == FIT  # of no QEMU, kernel or size that is here now
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
    part(name, "draft").touch()
    capture = await Capture.prepare(host, _instance(), name)
    manifest = capture.write("box", 4096, None, durable=durable)
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
    name = host.layout.memory("one") / "0"
    image.save(name, written(name), durable=False)
    record = Suspended(SPEC, "0", 0)
    suspended.save(host.layout, record)
    return record


def _layer(size: int) -> Callable[..., Any]:
    async def write(host: Host, spec: SandboxSpec, target: Path, number: int) -> int:
        assert not image.exists(target)  # the layer is there before the manifest
        await asyncio.to_thread(target.write_bytes, os.urandom(size))
        return size

    return write


async def test_a_copy_of_a_suspended_one_is_counted_and_covered(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, target = _asleep(host), tmp_path / "copy"
    monkeypatch.setattr(commits, "commit_halted", _layer(100_000))
    suspending = Suspending(host, cast(Restorer, None))
    os.link(host.layout.memory("one") / "0.ram", tmp_path / "base.ram")  # that of a base, as nearly always
    size = await suspending.commit(record, target)
    own = sum(part(target, what).stat().st_blocks * 512 for what in ("state", "pages0", "base", "memory"))
    assert size == 100_000 + own
    assert image.taken(target) == part(target, "memory").stat().st_blocks * 512  # all else has its other name
    manifest = image.load(target)
    assert manifest.disk
    Checker().check(target, manifest)
    with pytest.raises(SandboxError, match="it is there already"):
        await suspending.commit(record, target)
    assert image.load(target) == manifest


async def test_a_copy_that_fails_leaves_nothing(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, target = _asleep(host), tmp_path / "layers" / "copy"
    target.parent.mkdir()
    monkeypatch.setattr(commits, "commit_halted", _layer(100))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image, "save", full)
    with pytest.raises(SandboxError, match="No space left"):
        await Suspending(host, cast(Restorer, None)).commit(record, target)
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
    for name in (disk.BLANK, disk.image(0)):
        (host.layout.disk("one") / name).touch()
    monkeypatch.setattr(disk, "above", lambda *_: None)


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
    woken = await Suspending(host, cast(Restorer, waking)).wake(cast(Choice, None), SPEC)
    assert woken is cast(MicroVMInstance, waking)
    assert records == [False]  # brought there once it was gone; that it cannot be is no reason to end it
    assert suspended.ids(host.layout) == []


@pytest.mark.usefixtures("asleep")
async def test_a_wake_that_is_called_off_at_its_end_leaves_it_suspended(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget, loop = suspended.forget, asyncio.get_running_loop()
    waking = asyncio.ensure_future(
        Suspending(host, cast(Restorer, _Waking())).wake(cast(Choice, None), SPEC),
    )

    def called_off(layout: Layout, sandbox_id: str) -> None:
        forget(layout, sandbox_id)
        loop.call_soon_threadsafe(waking.cancel)

    monkeypatch.setattr(suspended, "forget", called_off)
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert suspended.ids(host.layout) == ["one"]
    assert suspended.load(host.layout, "one") == Suspended(SPEC, "0", 0)


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
