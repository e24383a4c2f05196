"""A host whose disk is full, and then is not: a small one of the node's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandyard.config import MicroVMSettings, PathSettings, Settings
from sandyard.errors import CreateFailed, HostFull
from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.layout import Layout
from tests.yard import guest_settings, node_home

pytestmark = [pytest.mark.root, pytest.mark.full, pytest.mark.timeout(600)]
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
WRITE = "head -c 24M /dev/urandom > /root/big; sync; sha256sum < /root/big > /root/sum"


def fill(path: Path, left: int) -> None:
    """Take all but `left` bytes."""
    stat = os.statvfs(path.parent)
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - left)


@pytest.fixture
def small() -> Iterator[Path]:
    """The directories of a node whose disk is small."""
    with node_home() as home:
        disk, node = home / "disk", home / "node"
        node.mkdir()
        disk.touch()
        os.truncate(disk, 2 << 30)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", disk], check=True)
        subprocess.run(["mount", "-o", "loop", disk, node], check=True)
        try:
            yield node
        finally:
            _unmount(node)


def _unmount(node: Path) -> None:
    """What was killed may take a moment to let go of its files."""
    end = time.monotonic() + 20
    while (ended := subprocess.run(["umount", node], check=False, capture_output=True, text=True)).returncode != 0:
        assert time.monotonic() < end, ended.stderr
        time.sleep(0.1)


async def test_a_guest_waits_for_room_and_loses_nothing(small: Path, base: Rootfs) -> None:
    paths = PathSettings(state=small / "state", run=small / "run")
    settings = Settings(paths=paths)
    Layout.of(settings).prepare()  # with block images of its own: links to them do not leave a file system
    runtime = MicroVMRuntime(await guest_settings(settings))
    try:
        await _waits(runtime, base, small / "ballast")
    finally:
        await runtime.destroy("full")
        await runtime.close()


async def test_a_create_whose_guest_stands_still_is_undone_at_once(small: Path, base: Rootfs) -> None:
    paths = PathSettings(state=small / "state", run=small / "run")
    settings = Settings(paths=paths, microvm=MicroVMSettings(spares=0))
    Layout.of(settings).prepare()
    runtime, ballast = MicroVMRuntime(await guest_settings(settings)), small / "ballast"
    try:
        await runtime.create(SandboxSpec("first", base, SMALL, hostname="first"))  # what is made once is there
        await asyncio.to_thread(fill, ballast, 256 << 10)
        other = replace(SMALL, memory_mb=96)  # it boots
        with pytest.raises(CreateFailed, match="no room for what it writes; free space below") as caught:
            await runtime.create(SandboxSpec("boots", base, other, hostname="boots"))
        assert caught.value.stage == "disk"
        assert await runtime.list() == ["first"]
        await asyncio.to_thread(ballast.unlink)
        boots = await runtime.create(SandboxSpec("boots", base, other, hostname="boots"))
        assert await Kit(runtime, base, boots).output("hostname") == "boots"
    finally:
        for name in await runtime.list():
            await runtime.destroy(name)
        await runtime.close()


async def _waits(runtime: MicroVMRuntime, base: Rootfs, ballast: Path) -> None:
    instance = await runtime.create(SandboxSpec("full", base, SMALL, hostname="full"))
    assert isinstance(instance, MicroVMInstance)
    kit = Kit(runtime, base, instance)
    await asyncio.to_thread(fill, ballast, 4 << 20)
    writing = asyncio.ensure_future(kit.run(WRITE, timeout=200))
    async with asyncio.timeout(120):
        while not instance.stall.lasts:
            assert not writing.done()
            await asyncio.sleep(0.1)
    assert (await instance.control.execute("query-status"))["status"] == "io-error"
    await asyncio.sleep(6)  # it was tried again meanwhile
    assert instance.stall.lasts
    assert not writing.done()
    for move in (instance.pause(), runtime.suspend("full"), instance.commit(ballast.with_name("layer"), memory=True)):
        with pytest.raises(HostFull, match="no room"):
            await asyncio.wait_for(move, 10)
    await asyncio.to_thread(ballast.unlink)
    assert (await writing).status.code == 0
    assert await kit.output("sha256sum < /root/big | cmp - /root/sum && echo whole") == "whole"
    assert not instance.stall.lasts or await runtime.try_again(instance) is False
    await instance.pause()
    await instance.resume()
    assert await kit.output("sha256sum < /root/big | cmp - /root/sum && echo whole") == "whole"
