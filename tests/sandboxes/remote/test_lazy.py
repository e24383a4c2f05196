"""A layer that is started from before its bytes are here: what is read comes first, and only as it was stored."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandyard.config import BlobSettings, PathSettings, Settings
from sandyard.errors import HostError
from sandyard.sandboxes.remote.lazy import LazyChecks, LazyLayers
from sandyard.sandboxes.remote.manifest import LayerManifest
from sandyard.store.blobs.chunks import chunk_key, digest_of, encode
from sandyard.store.blobs.lazy.fuse import detach
from sandyard.store.blobs.lazy.order import Order, Word
from sandyard.store.blobs.local import LocalBlobs

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]
CHUNK, SIZE = 1 << 18, 12 << 20
NAME = "a" * 20


class Yard:
    """A layer of 12 MiB in a storage: 8 MiB of noise with a hole of 4 MiB before the last of it."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(
            paths=PathSettings(state=home / "state", run=home / "run"),
            blobs=BlobSettings(url=f"file://{home / 'storage'}", lazy="auto", concurrency=2),
        )
        self.storage = home / "storage"
        noise = random.Random(1)
        self.hold(noise.randbytes(6 << 20) + bytes(4 << 20) + noise.randbytes(2 << 20))
        self.layer = home / "state" / "layers" / NAME
        self.layer.parent.mkdir(parents=True)
        self.lazy = LazyLayers(self.settings)
        self.mount = home / "run" / "lazy" / NAME

    def hold(self, content: bytes) -> None:
        """What the layer is."""
        self.content = content
        pieces = [(at, content[at : at + CHUNK]) for at in range(0, SIZE, CHUNK)]
        self._pieces = [(at, data) for at, data in pieces if any(data)]
        chunks = [(at, len(data), digest_of(data)) for at, data in self._pieces]
        self.manifest = LayerManifest("file", NAME, SIZE, CHUNK, [], chunks)

    async def upload(self) -> None:
        blobs = LocalBlobs(self.storage)
        for _, data in self._pieces:
            await blobs.put(chunk_key(digest_of(data)), encode(data))

    def chunk(self, number: int) -> Path:
        """Where the storage has a piece of the layer."""
        return self.storage / chunk_key(self.manifest.chunks[number][2])

    def pid(self) -> int:
        found, _ = Word(self.mount).heard()
        assert found is not None
        return found

    def read(self, offset: int, count: int) -> bytes:
        with open(self.layer, "rb", buffering=0) as file:
            return os.pread(file.fileno(), count, offset)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    made = Yard(tmp_path)
    yield made
    detach(made.mount)
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line]
    assert Word(made.mount).heard()[0] is None, "a process is left"


async def _until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


def _held(yard: Yard) -> None:
    """The storage has nothing but what is read first, so that the layer does not become whole meanwhile."""
    for number in range(1, len(yard.manifest.chunks)):
        yard.chunk(number).rename(yard.chunk(number).with_suffix(".held"))


def _released(yard: Yard) -> None:
    for path in yard.storage.glob("chunks/*/*.held"):
        path.rename(path.with_suffix(""))


async def test_it_is_read_at_once_and_becomes_a_file(yard: Yard) -> None:
    await yard.upload()
    await yard.lazy.start()
    try:
        await yard.lazy.bring(yard.layer, yard.manifest)
        for offset, count in (
            (11 << 20, 70_000),
            (CHUNK - 10, 20),
            ((6 << 20) - 5, 10),
            (7 << 20, 4096),
            (SIZE - 3, 9),
        ):
            found = await asyncio.to_thread(yard.read, offset, count)
            assert found == yard.content[offset : offset + count], offset
        with await asyncio.to_thread(open, yard.layer, "rb", 0) as early:
            await _until(lambda: not yard.layer.is_symlink())
            assert await asyncio.to_thread(early.read, SIZE) == yard.content  # it keeps what it opened
        assert yard.layer.read_bytes() == yard.content
        assert yard.layer.stat().st_mode & 0o777 == 0o400
        assert yard.layer.stat().st_blocks * 512 < 9 << 20  # with its hole
        await _until(lambda: Word(yard.mount).heard()[0] is None)
        await _until(lambda: not list((yard.settings.paths.state / "blobs" / "lazy").iterdir()))
        assert [path.name for path in yard.layer.parent.iterdir()] == [NAME]
    finally:
        await yard.lazy.stop()


async def test_holes_are_told(yard: Yard) -> None:
    await yard.upload()
    _held(yard)
    try:
        await yard.lazy.bring(yard.layer, yard.manifest)
        with await asyncio.to_thread(open, yard.layer, "rb", 0) as file:
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 6 << 20
            assert os.lseek(file.fileno(), 7 << 20, os.SEEK_DATA) == 10 << 20
            assert os.lseek(file.fileno(), 11 << 20, os.SEEK_HOLE) == SIZE
            with pytest.raises(OSError, match="No such device or address"):
                os.lseek(file.fileno(), SIZE, os.SEEK_DATA)
    finally:
        await yard.lazy.stop()


@pytest.mark.parametrize("damage", ["flipped", "foreign", "cut", "gone"])
async def test_a_bad_chunk_is_an_error_with_a_name(yard: Yard, damage: str) -> None:
    await yard.upload()
    bad = yard.chunk(9)
    stored = bad.read_bytes()
    changed = {
        "flipped": stored[:-1] + bytes([stored[-1] ^ 1]),
        "foreign": yard.chunk(2).read_bytes(),
        "cut": stored[:-5],
    }
    if damage == "gone":
        bad.unlink()
    else:
        bad.write_bytes(changed[damage])
    try:
        await yard.lazy.bring(yard.layer, yard.manifest)
        with pytest.raises(OSError, match="Input/output error"):
            await asyncio.to_thread(yard.read, 9 * CHUNK + 1000, 10)
        assert await asyncio.to_thread(yard.read, 20 * CHUNK, CHUNK) == yard.content[20 * CHUNK : 21 * CHUNK]
        (finding,) = LazyChecks(yard.settings).check(deep=False).damaged
        assert bad.name in finding.problem
        assert yard.layer.is_symlink()
        bad.write_bytes(stored)
        assert await asyncio.to_thread(yard.read, 9 * CHUNK, CHUNK) == yard.content[9 * CHUNK : 10 * CHUNK]
    finally:
        await yard.lazy.stop()


async def test_a_killed_process_is_started_again(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy._LOOK_SECONDS", 0.1)
    await yard.upload()
    _held(yard)
    await yard.lazy.start()
    try:
        await yard.lazy.bring(yard.layer, yard.manifest)
        early = await asyncio.to_thread(os.open, yard.layer, os.O_RDONLY)
        try:
            assert await asyncio.to_thread(os.pread, early, 9, 5) == yard.content[5:14]
            killed = yard.pid()
            os.kill(killed, signal.SIGKILL)
            await _until(lambda: Word(yard.mount).heard()[0] not in (None, killed))
            with pytest.raises(OSError, match=r"not connected|Input/output error"):
                await asyncio.to_thread(os.pread, early, 9, CHUNK + 5)
        finally:
            with contextlib.suppress(OSError):  # who served it is gone
                os.close(early)
        _released(yard)
        yard.chunk(0).unlink()  # it is here, and known by its digest
        assert await asyncio.to_thread(yard.read, 0, SIZE) == yard.content
        os.kill(yard.pid(), signal.SIGKILL)
        await _until(lambda: not yard.layer.is_symlink(), 60)
        assert yard.layer.read_bytes() == yard.content
    finally:
        await yard.lazy.stop()


async def test_what_was_altered_meanwhile_is_fetched_again(yard: Yard) -> None:
    await yard.upload()
    _held(yard)
    await yard.lazy.bring(yard.layer, yard.manifest)
    assert await asyncio.to_thread(yard.read, 0, 10) == yard.content[:10]
    await yard.lazy.stop()
    assert yard.layer.is_symlink()
    assert not yard.layer.exists()
    part = yard.layer.with_name(f"{NAME}.lazy")
    part.write_bytes(b"other bytes" + part.read_bytes()[11:])
    _released(yard)
    await yard.lazy.start()
    try:
        assert await asyncio.to_thread(yard.read, 0, SIZE) == yard.content
    finally:
        await yard.lazy.stop()


async def test_a_layer_that_is_removed_is_not_fetched_any_more(yard: Yard) -> None:
    await yard.upload()
    _held(yard)
    await yard.lazy.bring(yard.layer, yard.manifest)
    yard.layer.unlink()
    await _until(lambda: Word(yard.mount).heard()[0] is None)
    assert list(yard.layer.parent.iterdir()) == []
    await yard.lazy.stop()


async def test_a_host_that_cannot_fetches_whole(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy.LEAST_BYTES", 1)
    assert await yard.lazy.can("x", {"x": yard.manifest})
    above = LayerManifest("delta", "b" * 20, SIZE, CHUNK, ["x"], [])
    assert not await yard.lazy.can("x", {"x": yard.manifest, "y": above})

    def refused(_: Path) -> int:
        raise HostError("/dev/fuse: Operation not permitted")

    monkeypatch.setattr("sandyard.sandboxes.remote.lazy.mount", refused)
    assert not await LazyLayers(yard.settings).can("x", {"x": yard.manifest})


async def test_a_process_that_cannot_serve_leaves_nothing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    elsewhere = yard.settings.model_copy(update={"blobs": BlobSettings(url="s3://bucket", lazy="auto")})
    with pytest.raises(HostError, match=r"is not served: .*no credentials"):
        await LazyLayers(elsewhere).bring(yard.layer, yard.manifest)
    assert list(yard.layer.parent.iterdir()) == []
    assert not list((yard.settings.paths.state / "blobs" / "lazy").iterdir())


def _says(yard: Yard, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = yard.storage.parent / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy.sys.executable", str(program))


def _lives(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_process_that_says_nothing_is_given_up(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy._START_SECONDS", 0.5)
    pid = yard.storage.parent / "pid"
    _says(yard, monkeypatch, f"echo $$ > {pid}\nln -s {yard.mount} {yard.layer}\nexec sleep 60")
    with pytest.raises(HostError, match="said nothing"):
        await asyncio.wait_for(yard.lazy.bring(yard.layer, yard.manifest), 30)
    assert not _lives(pid.read_text().strip())
    assert list(yard.layer.parent.iterdir()) == []
    assert not list((yard.settings.paths.state / "blobs" / "lazy").iterdir())


async def test_a_process_that_is_busy_is_waited_for(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy._START_SECONDS", 2.0)
    _says(yard, monkeypatch, "for i in 1 2 3 4 5; do echo busy; sleep 0.6; done; echo ready")
    began = time.monotonic()
    await yard.lazy.bring(yard.layer, yard.manifest)
    assert time.monotonic() - began > 2.5
    await yard.lazy.stop()


async def test_a_failure_does_not_end_the_looking_after(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy._LOOK_SECONDS", 0.02)
    looks = 0

    def fails(_: Path) -> Iterator[Order]:
        nonlocal looks
        looks += 1
        raise OSError("the disk is full")

    await yard.lazy.start()
    monkeypatch.setattr("sandyard.sandboxes.remote.lazy.orders", fails)
    try:
        await _until(lambda: looks > 2)
    finally:
        monkeypatch.undo()
        await yard.lazy.stop()


async def test_a_file_system_in_it_can_be_mounted(yard: Yard, tmp_path: Path) -> None:
    image, tree, where = tmp_path / "image", tmp_path / "tree", tmp_path / "where"
    for folder in (tree, where):
        folder.mkdir()
    (tree / "noise").write_bytes(yard.content[: 3 << 20])
    await _run("truncate", "-s", str(SIZE), str(image))
    await _run("mkfs.ext4", "-q", "-F", "-d", str(tree), str(image))
    yard.hold(image.read_bytes())
    await yard.upload()
    try:
        await yard.lazy.bring(yard.layer, yard.manifest)
        await _run("mount", "-o", "loop,ro,noload", str(yard.layer), str(where))
        try:
            assert await asyncio.to_thread((where / "noise").read_bytes) == (tree / "noise").read_bytes()
        finally:
            await _run("umount", str(where))
    finally:
        await yard.lazy.stop()


async def _run(*command: str) -> None:
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)
