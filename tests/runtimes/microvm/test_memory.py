"""Memory of real guests: copies that go on where one stood, suspended ones, what is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandyard.config import Settings
from sandyard.errors import CreateFailed, HostFull, SandboxError
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.image import Fit, part

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /run/n; sleep 0.05; done"
# What it has in memory and what lies on the disk follow each other: a line that is missing, or twice, shows that a
# copy's are not of one instant.
WRITER = "i=0; while :; do i=$((i+1)); echo $i >> /root/lines; sync /root/lines; done"


@pytest.fixture
def layers(settings: Settings) -> Path:
    home = settings.paths.state / "layers"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


async def made(runtime: MicroVMRuntime, base: Rootfs, name: str) -> tuple[MicroVMInstance, Kit]:
    instance = await runtime.create(SandboxSpec(name, base, SMALL, hostname=name))
    assert isinstance(instance, MicroVMInstance)
    return instance, Kit(runtime, base, instance)


def spec_of(base: Rootfs, layer: Path, name: str) -> SandboxSpec:
    stack = replace(base, layers=[layer, *base.layers])
    return SandboxSpec(name, stack, SMALL, hostname=name, memory=layer)


@asynccontextmanager
async def copied(runtime: MicroVMRuntime, base: Rootfs, layer: Path, name: str) -> AsyncIterator[Kit]:
    """A copy, and no trace of it afterwards: two guests at a time are enough for the host."""
    instance = await runtime.create(spec_of(base, layer, name))
    try:
        yield Kit(runtime, base, instance)
    finally:
        await runtime.destroy(name)


async def number(kit: Kit) -> int:
    return int(await kit.output("cat /run/n"))


async def has_the_time(kit: Kit) -> None:
    """That of the host, when it looked: the answer may take its time."""
    began = time.time()
    said = float(await kit.output("date +%s.%N"))
    assert began - 0.5 < said < time.time() + 0.5


async def counting(kit: Kit, pid: int) -> None:
    """The counter of this pid counts on."""
    assert pid in await kit.agent.processes()
    first = await number(kit)
    await kit.output(f"while [ $(cat /run/n) -le {first} ]; do sleep 0.05; done")


async def test_a_new_sandbox_is_a_copy_of_one_that_booted(runtime: MicroVMRuntime, base: Rootfs) -> None:
    (home,) = [path for path in runtime.host.layout.bases.iterdir() if path.is_dir()]
    links = part(home / "base", "ram").stat().st_nlink
    first, kit = await made(runtime, base, "first")
    second, other = await made(runtime, base, "second")
    assert [home] == [path for path in runtime.host.layout.bases.iterdir() if path.is_dir()]
    assert part(home / "base", "ram").stat().st_nlink == links + 2
    names = [await each.output("hostname; cat /etc/hostname") for each in (kit, other)]
    assert names == ["first\nfirst", "second\nsecond"]
    random = [
        await each.output("cat /proc/sys/kernel/random/uuid; head -c 16 /dev/urandom | od -x") for each in (kit, other)
    ]
    assert random[0] != random[1]
    assert first.pid != second.pid
    boots = (await runtime.choose()).boot_seconds  # of an empty guest, which mounts nothing
    took = [boots]
    while min(took) >= boots:  # the host may be busier than it was at the boot, for a while
        assert len(took) < 5, took
        await runtime.destroy("second")
        began = time.monotonic()
        await made(runtime, base, "second")
        took.append(time.monotonic() - began)


async def test_what_is_suspended_goes_on_under_another_server(
    runtime: MicroVMRuntime, base: Rootfs, settings: Settings
) -> None:
    instance, kit = await made(runtime, base, "sleeper")
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done; echo kept > /run/kept; echo disk > /root/disk")
    boot = await kit.output("cat /proc/sys/kernel/random/boot_id")
    before = await number(kit)
    await runtime.suspend("sleeper")
    assert not await asyncio.to_thread(Path(f"/proc/{instance.pid}").exists)
    assert await runtime.suspended() == ["sleeper"]
    assert await runtime.list() == ["sleeper"]
    await runtime.suspend("sleeper")  # as it is
    later = MicroVMRuntime(settings)
    try:
        assert await later.suspended() == ["sleeper"]
        assert await later.adopt("sleeper") is None
        await asyncio.sleep(2)
        woken = Kit(later, base, await later.wake(instance.spec))
        at = await number(woken)
        assert before <= at < before + 25  # what passed while it slept did not pass for it
        await has_the_time(woken)
        assert await woken.output("cat /run/kept /root/disk /proc/sys/kernel/random/boot_id") == f"kept\ndisk\n{boot}"
        await counting(woken, counter.pid)
        assert await later.suspended() == []
        await later.destroy("sleeper")
        assert await later.list() == []
    finally:
        await later.close()


async def test_a_snapshot_is_of_one_instant_and_its_source_goes_on(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await made(runtime, base, "writer")
    writer = await kit.start(WRITER)
    await kit.output("while [ ! -s /root/lines ]; do sleep 0.05; done; head -c 16M /dev/urandom > /dev/shm/held")
    layer = layers / "one"
    size = await instance.commit(layer, memory=True)
    assert 16 << 20 < size < 64 << 20
    lines = len((await kit.output("cat /root/lines")).split())
    async with copied(runtime, base, layer, "copy") as copy:
        assert writer.pid in await copy.agent.processes()
        assert await copy.output("hostname") == "copy"
        await has_the_time(copy)
        seen = (await copy.output("cat /root/lines")).split()
        assert [int(line) for line in seen] == list(range(1, len(seen) + 1))
    await kit.output(f"while [ $(wc -l < /root/lines) -le {lines} ]; do sleep 0.05; done")
    seen = (await kit.output("cat /root/lines")).split()
    assert [int(line) for line in seen] == list(range(1, len(seen) + 1))
    # A second one holds what changed since, and both can be started from.
    more = await instance.commit(layers / "two", parent=layer, memory=True)
    assert more < size // 2
    layer.unlink()
    image.remove(layer)
    async with copied(runtime, base, layers / "two", "later") as copy:
        seen = (await copy.output("cat /root/lines")).split()
        assert [int(line) for line in seen] == list(range(1, len(seen) + 1))
        # And a copy of a copy.
        await copy.sandbox.commit(layers / "three", memory=True)
    async with copied(runtime, base, layers / "three", "third") as copy:
        assert writer.pid in await copy.agent.processes()


@pytest.mark.parametrize("forks", [3, pytest.param(8, marks=pytest.mark.full)])
async def test_forks_are_apart_from_the_first_moment(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, forks: int
) -> None:
    instance, kit = await made(runtime, base, "source")
    # What runs in a copy at all runs with the copy's own name, time and randomness.
    await kit.start(
        "while [ $(hostname) = source ]; do sleep 0.01; done; hostname > /run/draft;"
        " cat /proc/sys/kernel/random/uuid >> /run/draft; date +%s >> /run/draft; mv /run/draft /run/first"
    )
    await instance.commit(layers / "one", memory=True, durable=False)
    seen: set[str] = set()
    for count in range(forks):
        began = time.time()
        async with copied(runtime, base, layers / "one", f"fork{count}") as copy:
            await copy.output("while [ ! -e /run/first ]; do sleep 0.05; done")
            name, uuid, at = (await copy.output("cat /run/first")).split()
            assert name == f"fork{count}"
            assert began - 2 < int(at) < time.time() + 1
            seen |= {uuid, await copy.output("head -c 16 /dev/urandom | od -An -tx1")}
            seen.add(await copy.output("cat /proc/sys/kernel/random/uuid"))
    assert len(seen) == 3 * forks
    assert await kit.output("hostname") == "source"


async def test_one_that_is_suspended_can_be_copied(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, kit = await made(runtime, base, "asleep")
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done")
    await runtime.suspend("asleep")
    await runtime.commit_halted("asleep", layers / "one", memory=True)
    await runtime.commit_halted("asleep", layers / "files")
    for path in runtime.host.layout.images.glob("*.img"):  # a template that was made anew
        path.unlink()
    async with copied(runtime, base, layers / "one", "copy") as copy:
        await counting(copy, counter.pid)
    with pytest.raises(SandboxError, match="there already"):
        await runtime.commit_halted("asleep", layers / "files", memory=True)
    with pytest.raises(CreateFailed, match="has no memory"):
        await runtime.create(spec_of(base, layers / "files", "none"))
    await runtime.halt("asleep")
    assert (await runtime.suspended(), await runtime.halted()) == ([], ["asleep"])
    with pytest.raises(SandboxError, match="not suspended"):
        await runtime.commit_halted("asleep", layers / "two", memory=True)
    assert not [name for name in os.listdir(layers) if name.startswith("two")]
    await runtime.boot(instance.spec)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    """One bit of what is data in the middle."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        at = os.lseek(descriptor, path.stat().st_size // 2, os.SEEK_DATA)
        byte = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes((byte[0] ^ 4,)), at)
    finally:
        os.close(descriptor)


async def test_what_is_damaged_is_refused(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, _ = await made(runtime, base, "whole")
    await instance.commit(layers / "one", memory=True, durable=False)
    for path in (layers / "one", *(part(layers / "one", what) for what in ("state", "ram", "pages0", "memory"))):
        kept = layers / "kept"
        shutil.copyfile(path, kept)
        for damage in (_cut, _flip):
            path.unlink()  # its other names stay as they are
            shutil.copyfile(kept, path)
            await asyncio.to_thread(damage, path)
            with pytest.raises(CreateFailed) as caught:
                await runtime.create(spec_of(base, layers / "one", "broken"))
            assert caught.value.stage == "snapshot", damage
            assert "one" in caught.value.message, damage
        path.unlink()
        with pytest.raises(CreateFailed) as caught:
            await runtime.create(spec_of(base, layers / "one", "broken"))
        assert caught.value.stage == "snapshot"
        assert "one" in caught.value.message
        kept.rename(path)
        path.chmod(0o444)
    assert await runtime.list() == ["whole"]
    async with copied(runtime, base, layers / "one", "mended") as copy:
        assert await copy.output("hostname") == "mended"


def _with(fit: Fit, name: str, value: object) -> Fit:
    changes: dict[str, Any] = {name: value}
    return replace(fit, **changes)


async def test_what_is_of_another_host_or_sandbox_is_refused(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, _ = await made(runtime, base, "native")
    layer = layers / "one"
    await instance.commit(layer, memory=True, durable=False)
    spec = spec_of(base, layer, "foreign")
    for resources, reason in (
        (replace(SMALL, memory_mb=256), "memory in MiB"),
        (replace(SMALL, cpu=2.0), "number of CPUs"),
        (replace(SMALL, disk_mb=128), "disk in MiB"),
    ):
        with pytest.raises(CreateFailed, match=reason):
            await runtime.create(replace(spec, resources=resources))
    whole = image.load(layer)
    for name, value, reason in (
        ("accel", "other", "another accelerator: other"),
        ("machine", "other", "another machine type: other"),
        ("cpu", "other", "another CPU model: other"),
        ("engine", "1.0", "another QEMU: 1.0"),
        ("image", "other", "another block image of the template: other"),
        ("protocol", 0, "another protocol of the agent: 0"),
    ):
        image.save(layer, replace(whole, fit=_with(whole.fit, name, value)), durable=False)
        with pytest.raises(CreateFailed, match=reason) as caught:
            await runtime.create(spec)
        assert caught.value.stage == "snapshot"
    assert await runtime.list() == ["native"]


async def test_memory_is_said_to_be_of_what_its_guest_was_made_on(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await made(runtime, base, "former")
    layer, settings = layers / "one", runtime.host.settings
    more = settings.microvm.model_copy(update={"guest_mb": settings.microvm.guest_mb + 16})
    monkeypatch.setattr(runtime.host, "settings", settings.model_copy(update={"microvm": more}))  # of a later server
    await instance.commit(layer, memory=True, durable=False)
    assert image.load(layer).fit.memory_mb == SMALL.memory_mb + settings.microvm.guest_mb
    with pytest.raises(CreateFailed, match="another memory in MiB"):
        await runtime.create(spec_of(base, layer, "later"))
    monkeypatch.undo()
    async with copied(runtime, base, layer, "same") as copy:
        assert await copy.output("hostname") == "same"
    await asyncio.to_thread(
        (runtime.host.layout.home("former") / "fit.json").unlink
    )  # of a server before there was one
    for refused in (instance.commit(layers / "two", memory=True), runtime.suspend("former")):
        with pytest.raises(SandboxError, match="not known what sandbox former was made on"):
            await refused
    assert not [name for name in os.listdir(layers) if name.startswith("two")]
    await instance.commit(layers / "two")
    assert await kit.output("hostname") == "former"


async def test_a_snapshot_that_fails_leaves_nothing(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await made(runtime, base, "goes")
    monkeypatch.setattr(image, "save", _full)
    with pytest.raises(SandboxError, match="No space left"):
        await instance.commit(layers / "one", memory=True)
    assert os.listdir(layers) == []
    monkeypatch.undo()
    assert await kit.output("hostname") == "goes"
    await instance.commit(layers / "one", memory=True)
    assert image.load(layers / "one").disks


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_suspend_that_fails_leaves_it_running(
    runtime: MicroVMRuntime, base: Rootfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await made(runtime, base, "stays")
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done")
    monkeypatch.setattr(image, "save", _full)
    with pytest.raises(HostFull, match="No space left"):
        await runtime.suspend("stays")
    monkeypatch.undo()
    assert await runtime.suspended() == []
    await counting(kit, counter.pid)
    await runtime.suspend("stays")
    await _refuse_to_wake(runtime, instance)
    woken = Kit(runtime, base, await runtime.wake(instance.spec))
    await counting(woken, counter.pid)


async def _refuse_to_wake(runtime: MicroVMRuntime, instance: Instance) -> None:
    """A wake that fails leaves it suspended."""
    state = next(runtime.host.layout.memory(instance.spec.sandbox_id).glob("*.state"))
    kept = state.with_name("kept")
    state.rename(kept)
    with pytest.raises(CreateFailed, match="gone"):
        await runtime.wake(instance.spec)
    kept.rename(state)
    assert await runtime.suspended() == [instance.spec.sandbox_id]


async def test_many_snapshots_and_pauses_stay_as_quick_as_one(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await made(runtime, base, "often")
    counter = await kit.start(COUNTER)
    own = runtime.host.layout.disk("often")
    for count in range(12):
        await kit.output(f"echo {count} >> /root/log")
        if count % 2:
            await instance.commit(layers / f"layer{count}", durable=False, memory=count % 4 == 1)
        else:
            await runtime.suspend("often")
            woken = await runtime.wake(instance.spec)
            assert isinstance(woken, MicroVMInstance)
            instance, kit = woken, Kit(runtime, base, woken)
        assert len(list(own.glob("disk*.qcow2"))) <= 8
    assert (await kit.output("cat /root/log")).split() == [str(count) for count in range(12)]
    await counting(kit, counter.pid)


async def test_memory_goes_on_when_its_template_is_gone(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, tmp_path: Path
) -> None:
    """What a guest has mounted is kept with its memory. A template may be replaced many times while one is paused."""
    template = tmp_path / "template"
    (template / "srv").mkdir(parents=True)
    (template / "srv" / "word").write_text("kept")
    stack = replace(base, layers=[template, *base.layers])
    instance, kit = await made(runtime, stack, "sleeper")
    counter = await kit.start(COUNTER)
    await kit.output("while [ ! -s /run/n ]; do sleep 0.05; done")
    await instance.commit(layers / "one", memory=True)
    await runtime.suspend("sleeper")
    shutil.rmtree(template)
    kit = Kit(runtime, stack, await runtime.wake(instance.spec))
    await counting(kit, counter.pid)
    assert await kit.output("cat /srv/word") == "kept"
    await kit.sandbox.commit(layers / "two", memory=True)
    await runtime.destroy("sleeper")
    for name in ("one", "two"):
        async with copied(runtime, stack, layers / name, "copy") as copy:
            await counting(copy, counter.pid)
            assert await copy.output("cat /srv/word") == "kept"
