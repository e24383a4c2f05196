"""Images of memory that get fewer parts while they are there, on guests that are no machines."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sandyard.config import PathSettings, Settings
from sandyard.errors import SandboxError
from sandyard.runtimes import exchange
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.deltas import Chain, Delta, write_delta
from sandyard.runtimes.microvm import conf
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import capture, image, merging, suspended
from sandyard.runtimes.microvm.memory.capture import MAX_DEPTH, Capture
from sandyard.runtimes.microvm.memory.checking import Checker
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.merging import KEPT, Runs, compact, lowest
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.suspending import Suspending
from tests.runtimes.microvm.paper import MB, SPEC, PaperGuest, base, bytes_of, memory_of, paper_guest
from tests.yard import needs_qemu

DEEPEST = 2 * KEPT
"""An image whose lower deltas are others' too has at most so many."""


def more(name: Path, first: int, pages: int) -> None:
    """Let an image have one delta more."""
    manifest = image.load(name)
    what = f"pages{manifest.next_number}"
    blocks = [(number, os.urandom(PAGE)) for number in range(first, first + pages)] + [(900, bytes(PAGE))]
    write_delta(part(name, what), blocks, block_size=PAGE, size=MB << 20, parent=what, durable=False)
    with Delta(part(name, what)) as delta:
        image.save(name, manifest.topped(len(manifest.pages), delta.digest.hex()), durable=False)


@pytest.fixture
def name(tmp_path: Path) -> Path:
    """An image with six deltas, some of which hide others."""
    made = tmp_path / "images" / "one"
    made.parent.mkdir()
    base(made)
    for number in range(6):
        more(made, 10 * number, 200 if number == 1 else 12)
    return made


def whole(name: Path) -> Manifest:
    """The manifest of an image that has all it names, and nothing else, as it was written."""
    manifest = image.load(name)
    Checker().check(name, manifest)
    assert set(name.parent.iterdir()) == {*image.parts_of(name, manifest), part(name, "memory")}
    return manifest


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(0, 10))
def test_what_becomes_one_leaves_few_and_spares_what_others_share(sizes: list[int], floor: int) -> None:
    first = lowest(sizes, min(floor, len(sizes)))
    if first is None:
        assert len(sizes) <= DEEPEST
    else:
        assert first <= len(sizes) - 2
        assert first + 1 <= KEPT + 2
        assert first >= floor or floor > KEPT


def test_what_is_big_is_seldom_written_anew() -> None:
    sizes, written = [1000], 0
    for _ in range(300):
        sizes.append(1)
        if (first := lowest(sizes, 0)) is not None:
            sizes[first:] = [sum(sizes[first:])]
            written += sizes[-1]
        assert len(sizes) <= KEPT
    assert sum(sizes) == 1300
    assert written < 300 * 60  # where all became one each time it would be 100 times 1150


def test_its_content_stays(name: Path) -> None:
    before, content = image.load(name), memory_of(name)
    shared = part(name, "pages0").stat().st_ino
    assert compact(name, 1) == whole(name)
    after = image.load(name)
    assert len(after.pages) < len(before.pages)
    assert (after.ram, list(after.pages[:1])) == (before.ram, list(before.pages[:1]))
    assert part(name, "pages0").stat().st_ino == shared
    assert after.names[-1] not in before.names
    assert memory_of(name) == content
    assert compact(name, 1) is None
    more(name, 5, 3)
    assert len(whole(name).pages) == len(after.pages) + 1


def test_only_what_was_written_anew_is_trusted(name: Path) -> None:
    """Else a damaged file below would be taken for whole."""
    made, checker = compact(name, 1), Checker()
    assert made is not None
    checker.trust_last(name, made)
    flip(part(name, made.names[-1]), 5000)
    flip(part(name, "ram"), 5000)
    with pytest.raises(Unfit, match="MiB 0 is not what was written"):
        checker.check(name, made)
    flip(part(name, "ram"), 5000)
    checker.check(name, made)  # the pages are not read


def flip(path: Path, at: int) -> None:
    """One bit, unnoticed by whoever looks at its size and time."""
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def vars_of(manifest: Manifest) -> dict[str, Any]:
    return {each: getattr(manifest, each) for each in Manifest.__dataclass_fields__}


def test_what_earlier_versions_wrote_is_read(name: Path) -> None:
    manifest = image.load(name)
    old = Manifest(**{**vars_of(manifest), "numbers": []})
    assert old.names == manifest.names == [f"pages{number}" for number in range(6)]
    assert old.next_number == manifest.next_number == 6
    image.save(name, old, durable=False)
    content = memory_of(name)
    compact(name, 0)
    whole(name)
    assert memory_of(name) == content


# Copies of the image, each compacted until it comes to one more of the steps that touch files: there it ends.
KILLED = """
import os, shutil, sys
from pathlib import Path
from sandyard.runtimes.microvm.memory.merging import compact
kept, copies = map(Path, sys.argv[1:])
left = 0
def hook(event, arguments):
    global left
    if event in ("open", "os.remove", "os.rename", "os.link"):
        left -= 1
        if left < 0:
            os._exit(9)
status, step = 9, 0
while os.waitstatus_to_exitcode(status) == 9 or not step:
    shutil.copytree(kept.parent, copies / str(step))
    child = os.fork()
    if not child:
        left = step
        sys.addaudithook(hook)
        compact(copies / str(step) / kept.name, 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    step += 1
assert status == 0
"""


def test_wherever_it_is_killed_there_is_a_whole_image(name: Path, tmp_path: Path) -> None:
    content, copies = memory_of(name), tmp_path / "copies"
    copies.mkdir()
    source = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", KILLED, str(name), str(copies)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": source}, check=True)
    depths, half = list[int](), 0
    for home in sorted(copies.iterdir(), key=lambda path: int(path.name)):
        copy = home / name.name
        manifest = image.load(copy)
        Checker().check(copy, manifest)
        depths.append(len(manifest.pages))
        assert memory_of(copy) == content
        half += len(list(home.iterdir())) > len(image.parts_of(copy, manifest)) + 1
        compact(copy, 1)  # the next one clears up, also where nothing is to be done
        part(copy, "memory.part").unlink(missing_ok=True)
        assert len(whole(copy).pages) < 6
        assert memory_of(copy) == content
        image.remove(copy)
        assert list(home.iterdir()) == []
    assert depths == sorted(depths, reverse=True)
    assert len(set(depths)) == 2
    assert half > 5


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", range(4))
def test_a_full_disk_leaves_what_was(name: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    content, before, fsync = memory_of(name), image.load(name), os.fsync
    calls: list[int] = []

    def maybe(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at + 1:
            _full()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", maybe)
    with pytest.raises(OSError, match="No space left"):
        compact(name, 0)
    monkeypatch.undo()
    manifest = image.load(name)
    Checker().check(name, manifest)
    assert (manifest == before) == (at < 3)  # the last is of the directory, once all is there
    assert memory_of(name) == content
    compact(name, 0)
    assert len(whole(name).pages) <= 2


def test_without_room_nothing_is_written(name: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = image.load(name)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=4096))
    with pytest.raises(SandboxError, match="no room for 1 MiB of pages as one"):
        compact(name, 0)
    assert whole(name) == before


def test_what_is_damaged_does_not_become_whole(name: Path) -> None:
    path = part(name, "pages3")
    flip(path, 5000)
    before = image.load(name)
    with pytest.raises(SandboxError, match=r"pages3: blocks .* are not what was written"):
        compact(name, 0)
    shutil.copyfile(part(name, "pages2"), path)
    with pytest.raises(Unfit, match="pages3 is not what was written, but another one"):
        compact(name, 0)
    assert image.load(name) == before
    assert not part(name, "pages6").exists()


def _delete(name: Path) -> None:
    image.remove(name)


def _carry_off(name: Path) -> None:
    """As a server does that removes layers."""
    for number, path in enumerate(sorted(name.parent.iterdir())):
        path.rename(path.with_name(f".going{number}"))


@pytest.fixture(params=[True, False], ids=["exchange", "rename"])
def exchanges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two names."""

    def absent(*_: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    if not request.param:
        monkeypatch.setattr(exchange, "_libc", SimpleNamespace(renameat2=absent))
    return bool(request.param)


@pytest.mark.usefixtures("exchanges")
def test_on_any_file_system(name: Path) -> None:
    content = memory_of(name)
    assert compact(name, 0) == whole(name)
    assert memory_of(name) == content


@pytest.mark.usefixtures("exchanges")
@pytest.mark.parametrize("remove", [_delete, _carry_off])
def test_one_that_is_removed_meanwhile_stays_so(name: Path, remove: Callable[[Path], None]) -> None:
    def removing(runs: Runs, _: Path) -> Runs:
        for number, run in enumerate(runs):
            if number == 1:
                remove(name)
            yield run

    with pytest.raises(FileNotFoundError):
        compact(name, 0, removing)
    assert list(name.parent.glob("one*")) == []


def test_it_is_shared_and_checked_while_it_changes(name: Path, tmp_path: Path) -> None:
    """Who links or reads an image meanwhile gets it whole: with the old parts, or the new one."""
    copies, ended = tmp_path / "copies", threading.Event()
    copies.mkdir()
    states, seen, depths = {hash(memory_of(name))}, set[int](), set[int]()

    def compacting() -> None:
        number = 0
        while not ended.is_set():
            more(name, number % 500, 9)
            states.add(hash(memory_of(name)))
            compact(name, 0)
            number += 1

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(compacting)
        try:
            for count in range(30):
                copy = copies / f"copy{count}"
                manifest = image.share(name, copy)
                image.save(copy, manifest, durable=False)
                Checker().check(copy, manifest)
                image.settled(name, lambda found: Checker().check(name, found))
                seen.add(hash(memory_of(copy)))
                depths.add(len(manifest.pages))
                image.remove(copy)
        finally:
            ended.set()
        writer.result()
    assert list(copies.iterdir()) == []
    assert seen <= states
    assert max(depths) <= 7


def test_one_that_changes_while_it_is_shared(name: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, link = memory_of(name), os.link

    def late(source: Path, target: Path, **options: Any) -> None:
        if source.name == "one.pages3":
            compact(name, 0)
        link(source, target, **options)

    monkeypatch.setattr(os, "link", late)
    manifest = image.share(name, tmp_path / "copy")
    assert manifest == image.load(name)
    assert len(manifest.pages) <= KEPT
    assert {path.name for path in tmp_path.glob("copy*")} == {
        part(name, what).name.replace("one", "copy") for what in ("ram", "base", "state", *manifest.names)
    }
    assert memory_of(name) == content


def test_what_is_half_shared_is_not_left(name: Path, tmp_path: Path) -> None:
    part(name, "pages5").unlink()
    with pytest.raises(FileNotFoundError):
        image.share(name, tmp_path / "copy")
    assert list(tmp_path.glob("copy*")) == []


async def test_in_the_background_one_at_a_time(name: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name, *(tmp_path / f"other{number}" / "0" for number in range(3))]
    for other in names[1:]:
        other.parent.mkdir()
        image.save(other, image.share(name, other), durable=False)
    content, at_work, trusted = memory_of(name), list[Path](), list[Path]()
    real = merging.compact

    def watched(path: Path, floor: int, slow: merging.Slow) -> Manifest | None:
        at_work.append(path)
        assert len(at_work) == 1
        try:
            return real(path, floor, slow)
        finally:
            at_work.remove(path)

    monkeypatch.setattr("sandyard.runtimes.microvm.memory.compaction.compact", watched)
    monkeypatch.setattr("sandyard.runtimes.microvm.memory.compaction._SYNCED", 1)
    compactor = Compactor(lambda path, _: trusted.append(path))
    for each in (*names, *names):
        compactor.soon(each)
    await compactor.idle()
    assert trusted == names
    for each in names:
        assert len(whole(each).pages) <= KEPT
        assert memory_of(each) == content
    compactor.soon(name)  # it has few
    await compactor.idle()
    assert trusted == names
    await compactor.close()


class Held:
    """Merges that stand still until they are stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        loop, real = asyncio.get_running_loop(), merging.compact

        def slowly(path: Path, floor: int, slow: merging.Slow) -> Manifest | None:
            def runs(given: Runs, target: Path) -> Runs:
                for run in slow(given, target):
                    loop.call_soon_threadsafe(self.begun.set)
                    yield run
                    assert slow._stopped.wait(20)  # type: ignore[attr-defined]

            return real(path, floor, runs)

        monkeypatch.setattr("sandyard.runtimes.microvm.memory.compaction.compact", slowly)


@pytest.mark.parametrize("way", ["leave", "close", "cancel"])
async def test_who_wants_the_place_does_not_wait(name: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    before, held = image.load(name), Held(monkeypatch)
    compactor = Compactor(lambda *_: None)
    compactor.soon(name)
    await held.begun.wait()
    compactor.soon(name.with_name("two"))
    with capture_logs() as logs:
        async with asyncio.timeout(5):
            if way == "leave":
                await compactor.leave(name.parent.parent)  # another place
                assert part(name, "pages6.part").exists()
                await compactor.leave(name.parent)
            elif way == "close":
                await compactor.close()
                compactor.soon(name)
            else:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()
            await compactor.idle()
    assert whole(name) == before
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []
    await compactor.close()


async def test_one_that_fails_is_told_and_the_next_one_is_looked_at(name: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    image.save(other, image.share(name, other), durable=False)
    part(name, "pages5").unlink()
    compactor = Compactor(lambda *_: None)
    with capture_logs() as logs:
        compactor.soon(tmp_path / "gone")
        compactor.soon(name)
        compactor.soon(other)
        await compactor.idle()
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["image"] == str(name)
    assert "pages5" in warning["error"]
    assert len(image.load(other).pages) <= 2
    await compactor.close()


class Still(Host):
    """A host on which nothing runs."""

    async def end(self, sandbox_id: str) -> None:
        shutil.rmtree(self.layout.home(sandbox_id), ignore_errors=True)


class Waking:
    """Starts the guest that needs no VMM."""

    def __init__(self, guest: PaperGuest) -> None:
        self._guest = guest
        self._checker = Checker()

    def trust(self, name: Path, manifest: Manifest) -> None:
        Checker().check(name, manifest)

    async def fitting(self, choice: Choice, spec: SandboxSpec, name: Path) -> Manifest:
        manifest = image.load(name)
        self._checker.check(name, manifest)
        return manifest

    async def start(self, choice: Choice, spec: SandboxSpec, name: Path, manifest: Manifest) -> MicroVMInstance:
        await asyncio.to_thread(self._guest.start, name)
        return self._guest.instance


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Still(Settings(paths=PathSettings(state=tmp_path / "state", run=tmp_path / "run")))
    layout = made.layout
    for path in (layout.home("one"), layout.memory("one"), layout.disk("one"), layout.kept("one")):
        path.mkdir(parents=True)
    made.layout.block("one").write_bytes(b"block image")
    made.layout.images.mkdir()
    disks = Disks(made.layout, SPEC)
    disks.prepare()
    disks.add()
    monkeypatch.setattr(conf, "bytes_of", lambda _: 4096)
    return made


@needs_qemu
@pytest.mark.root
@pytest.mark.parametrize("quick", [False, True], ids=["with time", "without"])
async def test_thirty_pauses_keep_few_parts(host: Host, monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    guest = paper_guest(host, monkeypatch)
    waking = Waking(guest)
    compactor = Compactor(waking.trust)
    suspending = Suspending(host, cast(Restorer, waking), compactor)
    home = host.layout.memory("one")
    base(home / "0")
    guest.start(home / "0")
    deepest = 0
    for _ in range(30):
        guest.work(40)
        before = bytes(guest.ram)
        await suspending.suspend(guest.instance)
        if not quick:
            await compactor.idle()
        record = suspended.load(host.layout, "one")
        assert record is not None
        deepest = max(deepest, len(image.load(home / record.image).pages))
        assert bytes_of(home) < (MB << 20) * 4
        await suspending.wake(cast(Choice, None), SPEC)
        assert bytes(guest.ram) == before
        if quick:  # no compaction comes to its end
            await compactor.leave(home)
    assert (KEPT < deepest <= MAX_DEPTH) if quick else deepest == KEPT  # some may find the time after all
    await compactor.idle()
    assert bytes_of(home) < (MB << 20) * 3
    await compactor.close()


async def test_snapshots_of_copies_of_snapshots_stay_few_parts_and_their_own(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty times: started from the last snapshot, and two snapshots taken, the second above the first."""
    guest = paper_guest(host, monkeypatch)
    compactor = Compactor(lambda path, manifest: Checker().check(path, manifest))
    layers, memory = tmp_path / "layers", host.layout.memory("one")
    layers.mkdir()
    base(layers / "base")
    last, contents = layers / "base", dict[Path, bytes]()
    for count in range(20):
        image.remove(memory / "0")
        image.save(memory / "0", image.share(last, memory / "0"), durable=False)
        guest.start(memory / "0")
        for second in ("a", "b"):
            guest.work(8)
            last = layers / f"{count}{second}"
            capture = await Capture.prepare(host, guest.instance, last)
            await capture.take()
            manifest = capture.write("box", 4096, durable=True)
            assert len(manifest.pages) <= DEEPEST + 1
            assert capture.floor == len(image.load(memory / "0").pages)
            image.save(last, manifest, durable=True)
            lowest = image.load(memory / "0")
            assert (manifest.ram, list(manifest.pages[: capture.floor])) == (lowest.ram, list(lowest.pages))
            compactor.soon(last, capture.floor)
            contents[last] = bytes(guest.ram)
            if count % 3 == 0:
                await compactor.idle()
    await compactor.idle()
    for each, content in contents.items():
        assert len(image.load(each).pages) <= DEEPEST
        Checker().check(each, image.load(each))
        assert memory_of(each) == content
    # Nine pages each time: all but the base, and what became one, is of some hundred of those.
    assert bytes_of(layers) < (MB << 20) + 40 * 9 * PAGE * 12
    await compactor.close()


async def test_what_lies_below_is_opened_only_to_be_compared(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    guest, home = paper_guest(host, monkeypatch), host.layout.memory("one")
    base(home / "0")
    guest.start(home / "0")
    opened = list[int]()

    class Counted(Chain):
        def __init__(self, ram: Path, deltas: Sequence[Path], *, checked: bool = True) -> None:
            opened.append(len(deltas))
            super().__init__(ram, deltas, checked=checked)

    monkeypatch.setattr(capture, "Chain", Counted)
    for name in ("1", "2"):
        guest.work(8)
        taken = await Capture.prepare(host, guest.instance, home / name)
        await taken.take()
        image.save(home / name, taken.write("box", 4096, durable=False), durable=False)
        assert memory_of(home / name) == bytes(guest.ram)
        guest.start(home / name)
    assert opened == [1]
