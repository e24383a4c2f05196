"""Disks of snapshots of real guests: they cost what changed, each is of its own instant, and none needs another."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, commits, disk, disks, shortening
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, sharing
from sandyard.runtimes.microvm.memory.image import part
from sandyard.runtimes.microvm.qcow2 import header_of

pytestmark = [pytest.mark.root, pytest.mark.timeout(900)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
WRITER = "i=0; while :; do i=$((i+1)); echo $i >> /root/lines; sync /root/lines; done"
_MIB = 1 << 20


@pytest.fixture
def layers(settings: Settings) -> Path:
    home = settings.paths.state / "chains"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


async def made(runtime: MicroVMRuntime, base: Rootfs, name: str) -> tuple[MicroVMInstance, Kit]:
    instance = await runtime.create(SandboxSpec(name, base, SMALL, hostname=name))
    assert isinstance(instance, MicroVMInstance)
    return instance, Kit(runtime, base, instance)


@asynccontextmanager
async def copied(runtime: MicroVMRuntime, base: Rootfs, layer: Path, *, memory: bool = True) -> AsyncIterator[Kit]:
    stack = replace(base, layers=[layer, *base.layers])
    spec = SandboxSpec("copy", stack, SMALL, hostname="copy", memory=layer if memory else None)
    instance = await runtime.create(spec)
    try:
        yield Kit(runtime, base, instance)
    finally:
        await runtime.destroy("copy")


def taken(*paths: Path) -> int:
    """Bytes on the host's disk, each file once."""
    return sum({(stat.st_ino): stat.st_blocks * 512 for stat in map(Path.stat, paths)}.values())


def parts(layer: Path) -> list[Path]:
    """The images of its disk, the lowest first."""
    return [path for path in image.chain_of(layer) if not image.is_blank(path, layer)]


def disks_of(runtime: MicroVMRuntime, instance: Instance) -> Disks:
    return Disks(runtime.host.layout, instance.spec)


class Reading:
    """Counts what is read of images, and lets no tool read them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        chunks = disk._chunks

        def counted(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
            for at, data in chunks(descriptor, size):
                self.bytes += len(data)
                yield at, data

        monkeypatch.setattr(disk, "_chunks", counted)
        monkeypatch.setattr(commits, "flatten", None)


async def test_a_snapshot_costs_what_changed_of_the_disk(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await made(runtime, base, "big")
    fill = "head -c 8M /dev/urandom > /root/some; for n in 1 2 3 4; do cat /root/some; done > /root/big; sync"
    assert (await kit.run(fill, timeout=300)).status.code == 0
    await instance.commit(layers / "one", memory=True)
    assert taken(layers / "one") > 40 * _MIB
    await kit.output("head -c 1M /dev/urandom > /root/small; sync; echo 3 > /proc/sys/vm/drop_caches")
    wanted = await kit.output("head -c 20M /root/big | sha256sum; sha256sum /root/some /root/small")
    reading = Reading(monkeypatch)
    await instance.commit(layers / "two", memory=True, parent=layers / "one")
    assert _MIB <= taken(layers / "two") < 4 * _MIB
    assert reading.bytes < 4 * _MIB
    assert [path.stat().st_ino for path in parts(layers / "two")[:-1]] == [
        path.stat().st_ino for path in parts(layers / "one")
    ]
    monkeypatch.undo()
    # A suspended one gives what it has: nothing is written again, and of its memory only names are made.
    await runtime.suspend("big")
    reading = Reading(monkeypatch)
    await runtime.commit_halted("big", layers / "three", memory=True)
    assert reading.bytes < 4 * _MIB
    together = taken(*(path for name in ("one", "two", "three") for path in parts(layers / name)))
    assert together < taken(layers / "one") + 8 * _MIB
    monkeypatch.undo()
    await runtime.destroy("big")
    image.remove(layers / "one")
    (layers / "one").unlink()
    async with copied(runtime, base, layers / "three") as copy:
        assert await copy.output("head -c 20M /root/big | sha256sum; sha256sum /root/some /root/small") == wanted


async def test_each_of_many_snapshots_is_of_its_own_instant(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await made(runtime, base, "writer")
    await kit.start(WRITER)
    await kit.output("while [ ! -s /root/lines ]; do sleep 0.05; done")
    marks: list[int] = []
    for name in ("one", "two", "three"):
        await kit.output(f"echo {name} > /root/name; sync /root/name")
        marks.append(await lines_of(kit))
        await instance.commit(layers / name, memory=True)
        marks.append(await lines_of(kit))
        await kit.output(f"while [ $(wc -l < /root/lines) -le {marks[-1]} ]; do sleep 0.05; done")
    await instance.pause()  # it takes all that the others need
    assert [len(parts(layers / name)) for name in ("one", "two", "three")] == [2, 3, 4]
    for number, name in enumerate(("one", "two", "three")):
        async with copied(runtime, base, layers / name) as copy:
            assert await copy.output("cat /root/name") == name
            assert await lines_of(copy) >= marks[2 * number]
        if name == "one":
            await asyncio.to_thread(image.remove, layers / "one")
            await asyncio.to_thread((layers / "one").unlink)
    # Its files alone, as another kernel or QEMU has to start it: of the same instant too.
    async with copied(runtime, base, layers / "two", memory=False) as files:
        assert await files.output("cat /root/name") == "two"
        assert marks[2] <= await lines_of(files) <= marks[3]
        assert await files.sandbox.commit(layers / "four") > 0
    await instance.resume()
    assert await lines_of(kit) > marks[-1]


async def lines_of(kit: Kit) -> int:
    """How many there are, of which none is missing."""
    seen = [int(line) for line in (await kit.output("cat /root/lines")).split()]
    assert seen == list(range(1, len(seen) + 1))
    return len(seen)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(os.lseek(file.fileno(), path.stat().st_size // 2, os.SEEK_DATA))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes((byte ^ 4,)))


async def test_what_is_damaged_below_is_refused_by_name(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, kit = await made(runtime, base, "whole")
    await kit.output("head -c 2M /dev/urandom > /root/data; sync")
    await instance.commit(layers / "one", memory=True, durable=False)
    await instance.commit(layers / "two", memory=True, durable=False)
    for path in (part(layers / "two", what) for what in ("disk0", "disk1", "blank")):
        kept = layers / "kept"
        for damage in (_cut, _flip):
            path.rename(kept)  # its other names stay as they are
            shutil.copyfile(kept, path)
            await asyncio.to_thread(damage, path)
            with pytest.raises(CreateFailed, match=f"{path.name}, of the disk that its memory goes with") as caught:
                async with copied(runtime, base, layers / "two"):
                    pass
            assert caught.value.stage == "snapshot"
            kept.rename(path)
        path.rename(kept)
        for memory in (True, False):
            with pytest.raises(CreateFailed, match=f"{path.name} is gone"):
                async with copied(runtime, base, layers / "two", memory=memory):
                    pass
        kept.rename(path)
    assert await runtime.list() == ["whole"]
    async with copied(runtime, base, layers / "two") as copy:
        assert await copy.output("sha256sum < /root/data") == await kit.output("sha256sum < /root/data")


async def at_rest(runtime: MicroVMRuntime) -> None:
    async with asyncio.timeout(120):
        await asyncio.gather(*runtime.host.background.values())


async def deep(runtime: MicroVMRuntime, base: Rootfs, layers: Path, rate_mb: int) -> tuple[MicroVMInstance, Kit]:
    """A sandbox whose disk is made one image right now, at that rate."""
    instance, kit = await made(runtime, base, "deep")
    await kit.output("head -c 12M /dev/urandom > /root/data; sha256sum /root/data > /root/sum; sync")
    await instance.commit(layers / "first", memory=True, durable=False)
    settings = runtime.host.settings
    runtime.host.settings = settings.model_copy(
        update={"microvm": settings.microvm.model_copy(update={"disk_mb_s": rate_mb})}
    )
    await instance.commit(layers / "second", memory=True, durable=False)
    runtime.host.settings = settings
    return instance, kit


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "DEEPEST", 4)


async def at_work(instance: MicroVMInstance) -> list[str]:
    """What shortens its disk right now."""
    jobs = await instance.control.execute("query-jobs")
    return [job["id"] for job in jobs if job["status"] == "running"]


async def goes_on(instance: MicroVMInstance) -> list[str]:
    """`at_work`, once there is something."""
    deadline = time.monotonic() + 60
    while not (found := await at_work(instance)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def held(instance: MicroVMInstance) -> set[str]:
    """The images that its VMM has open."""
    home = Path(f"/proc/{instance.pid}/fd")
    found = {os.readlink(path) for path in home.iterdir()}
    return {Path(path).name for path in found if ".qcow2" in path or "blank" in path}


@pytest.mark.usefixtures("shallow")
async def test_a_long_chain_is_made_one_while_the_guest_runs(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await deep(runtime, base, layers, 1)
    images = disks_of(runtime, instance)
    assert list(runtime.host.background) == ["deep"]
    assert images.depth() == 4
    assert await kit.output("sha256sum -c /root/sum") == "/root/data: OK"
    # Snapshots and commits go on above the image that is to have all.
    await instance.commit(layers / "third", memory=True, durable=False)
    await instance.commit(layers / "files", durable=False)
    assert await at_work(instance) == [f"{shortening.JOB}-2"]
    assert (images.top(), images.depth(), len(parts(layers / "third"))) == (5, 6, 4)
    await hurry(instance)
    await at_rest(runtime)
    # Then there were four again, of which it made two.
    assert images.chain() == [images.own / disk.image(number) for number in (4, 5)]
    assert list(images.kept.glob("*.qcow2")) == []
    assert await asyncio.to_thread(held, instance) == {disk.image(4), disk.image(5)}  # what is gone takes no room
    await kit.output("echo after > /root/after; sync")
    await instance.commit(layers / "fourth", memory=True)
    assert len(parts(layers / "fourth")) == 2
    assert taken(*parts(layers / "fourth")) > 12 * _MIB
    assert taken(layers / "fourth") < 4 * _MIB
    for name in ("second", "third", "files", "fourth"):
        async with copied(runtime, base, layers / name, memory=name != "files") as copy:
            assert await copy.output("sha256sum -c /root/sum") == "/root/data: OK"
            assert (await copy.run("test -e /root/after")).status.code == (0 if name == "fourth" else 1)


@pytest.mark.usefixtures("shallow")
async def test_it_is_called_off_before_the_guest_is_stopped(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await deep(runtime, base, layers, 1)
    assert await at_work(instance)
    await instance.pause()
    assert await shortening._job(instance) is None
    await instance.resume()
    await instance.commit(layers / "third", memory=True, durable=False)
    await at_rest(runtime)
    assert disks_of(runtime, instance).depth() < 4  # it is begun again, and has no limit any more
    assert await kit.output("sha256sum -c /root/sum") == "/root/data: OK"


async def hurry(instance: MicroVMInstance) -> None:
    for job in await at_work(instance):
        await instance.control.execute("block-job-set-speed", {"device": job, "speed": 0})


@pytest.mark.usefixtures("shallow")
async def test_a_chain_does_not_grow_without_bound_however_slow_its_disk(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shortening, "HURRY", 6)
    instance, kit = await deep(runtime, base, layers, 1)
    depths = []
    for number in range(8):
        await kit.output(f"echo {number} >> /root/numbers; sync")
        await instance.commit(layers / f"n{number}", memory=True, durable=False)
        depths.append(disks_of(runtime, instance).depth())
        if max(depths) >= 6:  # it is as fast as it can be from the next one on
            await asyncio.sleep(0.5)
    assert 6 <= max(depths) <= 8
    assert depths[-1] < 6
    await instance.commit(layers / "last", memory=True, durable=False)
    async with copied(runtime, base, layers / "last") as copy:
        assert (
            await copy.output("sha256sum -c /root/sum; cat /root/numbers | tr -d '\\n'") == "/root/data: OK\n01234567"
        )


@pytest.mark.usefixtures("shallow")
async def test_after_a_resume_a_snapshot_calls_it_off_and_it_goes_on_in_the_same_image(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    await deep(runtime, base, layers, 1)
    spec = runtime.host.instances["deep"].spec
    await runtime.suspend("deep")
    slow = runtime.host.settings.microvm.model_copy(update={"disk_mb_s": 1})
    fast, runtime.host.settings = runtime.host.settings, runtime.host.settings.model_copy(update={"microvm": slow})
    woken = await runtime.wake(spec)
    assert isinstance(woken, MicroVMInstance)
    images, kit = disks_of(runtime, woken), Kit(runtime, base, woken)
    assert await at_work(woken) == [f"{shortening.JOB}-4"]  # there is no other that its VMM could write to
    path = images.own / disk.image(4)
    await eventually(lambda: taken(path) >= 2 * _MIB)
    await woken.commit(layers / "third", memory=True, durable=False)
    assert images.top() == 5
    assert await goes_on(woken) == [f"{shortening.JOB}-4"]
    assert taken(path) >= 2 * _MIB
    # A fork in the middle of it.
    await woken.commit(layers / "fork", memory=True, durable=False)
    async with copied(runtime, base, layers / "fork") as copy:
        assert await copy.output("sha256sum -c /root/sum") == "/root/data: OK"
    assert await at_work(woken) == [f"{shortening.JOB}-4"]
    runtime.host.settings = fast
    await hurry(woken)
    await at_rest(runtime)
    assert [path.name for path in images.chain()] == [disk.image(number) for number in (4, 5, 6)]
    await woken.commit(layers / "fourth", memory=True, durable=False)
    for name in ("third", "fourth"):
        async with copied(runtime, base, layers / name) as copy:
            assert await copy.output("sha256sum -c /root/sum") == "/root/data: OK"
    assert await kit.output("sha256sum -c /root/sum") == "/root/data: OK"


@pytest.mark.usefixtures("shallow")
async def test_files_are_halted_whole_in_the_middle_of_it(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, _ = await deep(runtime, base, layers, 1)
    assert await at_work(instance)
    await runtime.halt("deep")
    assert disks_of(runtime, instance).depth() == 4
    booted = await runtime.boot(instance.spec)
    assert await Kit(runtime, base, booted).output("sha256sum -c /root/sum") == "/root/data: OK"


@pytest.mark.usefixtures("shallow")
async def test_a_pause_calls_it_off_and_a_later_server_goes_on(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, settings: Settings
) -> None:
    instance, kit = await deep(runtime, base, layers, 1)
    await kit.output("echo kept > /root/kept")
    assert await at_work(instance)
    await asyncio.wait_for(runtime.suspend("deep"), 30)
    assert runtime.host.background == {}
    images = disks_of(runtime, instance)
    assert images.depth() == 4
    woken = await runtime.wake(instance.spec)
    kit = Kit(runtime, base, woken)
    assert await kit.output("sha256sum -c /root/sum; cat /root/kept") == "/root/data: OK\nkept"
    await at_rest(runtime)
    assert images.depth() == 1
    assert list(images.kept.glob("*.qcow2")) == []
    assert header_of(images.own / disk.image(images.top())).whole
    assert await kit.output("sha256sum -c /root/sum; cat /root/kept") == "/root/data: OK\nkept"


@pytest.mark.usefixtures("shallow")
async def test_a_server_that_ends_leaves_it_to_the_next(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, settings: Settings
) -> None:
    await deep(runtime, base, layers, 1)
    (runtime.host.layout.disk("deep") / "layer-12").touch()  # what a killed one leaves
    await runtime.close()
    assert runtime.host.background == {}
    later = MicroVMRuntime(settings)
    try:
        found = await later.adopt("deep")
        assert isinstance(found, MicroVMInstance)
        assert await at_work(found) == [f"{shortening.JOB}-2"]
        assert not (later.host.layout.disk("deep") / "layer-12").exists()
        await found.commit(layers / "third", memory=True)
        await hurry(found)
        await at_rest(later)
        assert disks_of(later, found).depth() == 3
        await found.commit(layers / "fourth", memory=True)
        assert len(parts(layers / "fourth")) == 3
        for name in ("third", "fourth"):
            async with copied(later, base, layers / name) as copy:
                assert await copy.output("sha256sum -c /root/sum") == "/root/data: OK"
        await later.destroy("deep")
    finally:
        await later.close()


@pytest.mark.usefixtures("shallow")
async def test_one_that_is_destroyed_meanwhile_leaves_nothing(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    await deep(runtime, base, layers, 1)
    await runtime.destroy("deep")
    assert runtime.host.background == {}
    assert await runtime.list() == []
    async with copied(runtime, base, layers / "second") as copy:
        assert await copy.output("sha256sum -c /root/sum") == "/root/data: OK"


async def test_a_chain_too_long_is_written_whole(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "MOST", 3)
    instance, kit = await made(runtime, base, "long")
    for name in ("one", "two", "three"):
        await kit.output(f"echo {name} >> /root/names; sync")
        await instance.commit(layers / name, memory=True, durable=False)
    assert [len(parts(layers / name)) for name in ("one", "two", "three")] == [2, 1, 1]
    async with copied(runtime, base, layers / "three") as copy:
        assert await copy.output("cat /root/names") == "one\ntwo\nthree"
        await copy.sandbox.commit(layers / "four", memory=True, durable=False)
    assert len(parts(layers / "four")) == 2


def patch(path: Path, at: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


async def test_a_hostile_header_is_refused_at_the_snapshot(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    """As a VMM that was broken into may write it, into its own image."""
    instance, kit = await made(runtime, base, "hostile")
    own = disks_of(runtime, instance).own
    path = own / disk.image(1)
    await asyncio.to_thread(patch, path, 79, b"\4")  # the feature of an external data file
    for memory in (True, False):
        with pytest.raises(SandboxError, match=r"disk1\.qcow2 has what no image of a sandbox has"):
            await instance.commit(layers / "one", memory=memory)
    assert os.listdir(layers) == []
    assert await kit.output("echo alive") == "alive"
