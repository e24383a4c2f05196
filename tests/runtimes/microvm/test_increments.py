"""Snapshots of one guest after another: each costs what changed since the one before, and has all there is."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import capture, image, rebasing
from sandyard.runtimes.microvm.memory.inject import Mapper
from sandyard.runtimes.microvm.record import load_below, save_below
from tests.runtimes.microvm.test_memory import SMALL, copied, layers, made

__all__ = ["layers"]
pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]
HELD_MB = 24
# Holds pages that are all different, writes every 16th anew when told, says what is in all of them when asked.
HOLDER = f"""
import hashlib, os, sys
held = bytearray(os.urandom({HELD_MB} << 20))
os.mkfifo("/run/ask"); os.mkfifo("/run/told")
while True:
    word = open("/run/ask").read().strip()
    if word == "change":
        for at in range(0, len(held), 16 << 16): held[at:at + 4096] = os.urandom(4096)
    open("/run/told", "w").write(hashlib.md5(held).hexdigest())
"""


async def holding(runtime: MicroVMRuntime, base: Rootfs, name: str) -> tuple[MicroVMInstance, Kit]:
    instance, kit = await made(runtime, base, name)
    await kit.start(["/usr/bin/python3", "-c", HOLDER])
    # Python is slow where it is emulated, on a host that is busy.
    ran = await kit.run("while [ ! -p /run/told ]; do sleep 0.1; done", timeout=240)
    assert ran.status.code == 0
    return instance, kit


async def held(kit: Kit, word: str = "say") -> str:
    ran = await kit.run(f"echo {word} > /run/ask; cat /run/told", timeout=240)
    assert ran.status.code == 0
    return ran.text


def delta_mb(layer: Path) -> float:
    """Of what an image has above the one before."""
    newest = image.pages_of(layer, image.load(layer))[-1]
    return newest.stat().st_blocks * 512 / (1 << 20)


async def test_each_costs_what_changed_since_the_last(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, kit = await holding(runtime, base, "source")
    contents = []
    for name in ("one", "two", "three"):
        contents.append(await held(kit, "change"))
        await instance.commit(layers / name, memory=True, durable=name == "two")
    assert delta_mb(layers / "one") > HELD_MB
    assert delta_mb(layers / "two") < HELD_MB / 4
    assert delta_mb(layers / "three") < HELD_MB / 4
    image.remove(layers / "one")
    (layers / "one").unlink()
    assert await held(kit) == contents[2]
    for name, content in (("two", contents[1]), ("three", contents[2])):
        async with copied(runtime, base, layers / name, "copy") as copy:
            assert await held(copy) == content
            assert await held(copy, "change") != content
    assert await held(kit) == contents[2]
    await runtime.suspend("source")
    woken = await runtime.wake(instance.spec)
    assert await held(Kit(runtime, base, woken)) == contents[2]


async def test_what_its_children_do_not_change_they_share_with_it(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    instance, kit = await holding(runtime, base, "source")
    await held(kit, "change")
    await instance.commit(layers / "one", memory=True, durable=False)

    def maps_it(pid: int) -> bool:
        inode = image.pages_of(layers / "one", image.load(layers / "one"))[-1].stat().st_ino
        return any(line.split()[4] == str(inode) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())

    assert maps_it(instance.pid)
    async with copied(runtime, base, layers / "one", "copy") as copy:
        assert isinstance(copy.sandbox, MicroVMInstance)
        assert maps_it(copy.sandbox.pid)
    opened = [os.readlink(f"/proc/{instance.pid}/fd/{number}") for number in os.listdir(f"/proc/{instance.pid}/fd")]
    assert not [path for path in opened if ".pages" in path]


async def test_one_that_failed_is_made_up_for_by_the_next(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest goes on above what then could not be written whole."""
    instance, kit = await holding(runtime, base, "source")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    content = await held(kit, "change")
    monkeypatch.setattr(capture, "index_delta", full)
    with pytest.raises(SandboxError, match="No space left"):
        await instance.commit(layers / "one", memory=True, durable=False)
    monkeypatch.undo()
    home = runtime.host.layout.memory("source")
    assert os.listdir(layers) == []
    assert not image.exists(home / load_below(runtime.host.layout.home("source")))
    for name in ("two", "three"):
        await instance.commit(layers / name, memory=True, durable=False)
        async with copied(runtime, base, layers / name, "copy") as copy:
            assert await held(copy) == content
    assert delta_mb(layers / "three") < HELD_MB / 4
    names = {path.name.partition(".")[0] for path in home.iterdir()}
    assert names == {"base", load_below(runtime.host.layout.home("source"))}


async def test_too_much_is_not_held_on_the_disk_for_a_guest(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await holding(runtime, base, "source")
    below = load_below(runtime.host.layout.home("source"))
    monkeypatch.setattr(rebasing, "_HELD", 0)
    for name in ("one", "two"):
        content = await held(kit, "change")
        await instance.commit(layers / name, memory=True, durable=False)
        assert delta_mb(layers / name) > HELD_MB
        assert load_below(runtime.host.layout.home("source")) == below
    async with copied(runtime, base, layers / "two", "copy") as copy:
        assert await held(copy) == content


async def test_a_server_that_ended_between_record_and_mapping_costs_nothing_but_a_copy(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, kit = await holding(runtime, base, "source")
    content = await held(kit, "change")
    monkeypatch.setattr(Mapper, "map_over", lambda *_: None)
    await instance.commit(layers / "one", memory=True, durable=False)
    monkeypatch.undo()
    await instance.commit(layers / "two", memory=True, durable=False)
    async with copied(runtime, base, layers / "two", "copy") as copy:
        assert await held(copy) == content
    home = runtime.host.layout.home("source")
    await asyncio.to_thread(save_below, home, "99")  # of which nothing was written
    await instance.commit(layers / "three", memory=True, durable=False)
    async with copied(runtime, base, layers / "three", "copy") as copy:
        assert await held(copy) == content


async def test_a_paused_one_is_taken_as_it_stands(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    instance, kit = await holding(runtime, base, "source")
    content = await held(kit)
    await instance.pause()
    for name in ("one", "two"):
        await instance.commit(layers / name, memory=True, durable=False)
    assert delta_mb(layers / "two") < HELD_MB / 4
    await instance.resume()
    assert await held(kit) == content
    async with copied(runtime, base, layers / "two", "copy") as copy:
        assert await held(copy) == content


async def test_what_was_committed_without_memory_boots_once(
    runtime: MicroVMRuntime, base: Rootfs, layers: Path
) -> None:
    """Each later sandbox on those files is a copy of the first, with all that it has to have of its own."""
    instance, kit = await made(runtime, base, "first")
    await kit.output("echo kept > /root/file")
    await instance.commit(layers / "files", durable=False)
    await runtime.destroy("first")
    before = set(runtime.host.layout.bases.iterdir())
    stack = replace(base, layers=[layers / "files", *base.layers])
    ids = []
    for name in ("one", "two"):
        made_of_it = await runtime.create(SandboxSpec(name, stack, SMALL, hostname=name))
        copy = Kit(runtime, stack, made_of_it)
        assert await copy.output("cat /root/file; hostname; echo more >> /root/file; wc -l < /root/file") == (
            f"kept\n{name}\n2"
        )
        ids.append(await copy.output("cat /proc/sys/kernel/random/boot_id /proc/sys/kernel/random/uuid"))
    new = [home for home in runtime.host.layout.bases.iterdir() if home not in before and home.is_dir()]
    assert len(new) == 1, [image.load(home / "base").fit for home in new]
    assert not set(ids[0].split()) & set(ids[1].split())
    await made_of_it.commit(layers / "again", memory=True, durable=False)
    async with copied(runtime, stack, layers / "again", "copy") as last:
        assert await last.output("cat /root/file; hostname") == "kept\nmore\ncopy"


async def test_layers_of_one_name_are_told_apart(runtime: MicroVMRuntime, base: Rootfs, layers: Path) -> None:
    """Guests of both boot, and memory of one does not go on above the other."""
    instance, kit = await made(runtime, base, "first")
    stacks = []
    for word in ("one", "two"):
        await kit.output(f"echo {word} > /root/file")
        (layers / word).mkdir()
        await instance.commit(layers / word / "files", durable=False)
        stacks.append(replace(base, layers=[layers / word / "files", *base.layers]))
    for stack, word in zip(stacks, ("one", "two"), strict=True):
        copy = await runtime.create(SandboxSpec("copy", stack, SMALL, hostname="copy"))
        assert await Kit(runtime, stack, copy).output("cat /root/file") == word
        if word == "one":
            await copy.commit(layers / "memory", memory=True, durable=False)
        await runtime.destroy("copy")
    other = replace(base, layers=[layers / "memory", *stacks[1].layers])
    with pytest.raises(CreateFailed, match="another set of layers below"):
        await runtime.create(SandboxSpec("copy", other, SMALL, hostname="copy", memory=layers / "memory"))
