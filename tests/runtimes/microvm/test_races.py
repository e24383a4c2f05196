"""Two things at once with one sandbox, or one that is called off at any moment: all of it or nothing, and nothing is
left over."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import SandboxError, SandyardError
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime
from sandyard.runtimes.microvm.memory import image
from tests.runtimes.microvm.victim import copy_of
from tests.yard import leftovers

pytestmark = [pytest.mark.root, pytest.mark.timeout(3600)]
NAME = "racer"
SMALL = Resources(memory_mb=128, disk_mb=64, pids=64)
LONGEST = 1.2  # seconds that one of these takes here
_SETTLES = 20.0


class Races:
    """`round` makes one race with the sandbox `NAME`, which it has running first."""

    def __init__(self, runtime: MicroVMRuntime, settings: Settings, base: Rootfs, seed: int) -> None:
        self.runtime = runtime
        self.settings = settings
        self.base = base
        self.dice = random.Random(seed)
        self.spec = SandboxSpec(NAME, base, SMALL, hostname=NAME)
        self.layers = settings.paths.state / "layers"
        self.layer = self.layers / "kept"
        self.count = 0
        self.pid = 0
        self.kinds: dict[str, Callable[[Instance], Awaitable[None]]] = {
            "create called off": self.create_called_off,
            "fork called off": self.fork_called_off,
            "destroy during create": self.destroy_during_create,
            "destroy during commit": self.destroy_during_commit,
            "destroy during suspend": self.destroy_during_suspend,
            "destroy during wake": self.destroy_during_wake,
            "two wakes": self.two_wakes,
            "wake called off": self.wake_called_off,
            "suspend called off": self.suspend_called_off,
            "commit called off": self.commit_called_off,
            "suspend during commit": self.suspend_during_commit,
            "pause during commit": self.pause_during_commit,
            "link broken during commit": self.adopt_during_commit,
            "resume called off": self.resume_called_off,
        }

    async def begin(self) -> None:
        self.layers.mkdir(exist_ok=True)
        await (await self.running()).commit(self.layer, memory=True)

    async def round(self, kind: str) -> None:
        await self.kinds[kind](await self.running())
        await asyncio.to_thread(self._drop_layers)
        await self.runtime.destroy("child")
        await self.nothing_else()

    async def running(self) -> Instance:
        """The sandbox, with a process that was there before."""
        if NAME in await self.runtime.suspended():
            return await self.alive(await self.runtime.wake(self.spec))
        found = await self.runtime.adopt(NAME)
        if found is not None:
            return await self.alive(found)
        await self.runtime.destroy(NAME)
        made = await self.runtime.create(self.spec)
        self.pid = (await Kit(self.runtime, self.base, made).start("exec sleep 100000")).pid
        return made

    async def alive(self, instance: Instance) -> Instance:
        assert not instance.paused
        assert self.pid in await instance.agent.processes()
        assert await Kit(self.runtime, self.base, instance).output("hostname") == NAME
        return instance

    async def wait(self) -> None:
        await asyncio.sleep(self.dice.uniform(0, LONGEST))

    async def called_off(self, work: Awaitable[object]) -> bool:
        """Whether it was, before it was over."""
        task = asyncio.ensure_future(work)
        await self.wait()
        task.cancel()
        with suppress(asyncio.CancelledError, SandyardError):
            await task
        return task.cancelled()

    def new(self) -> Path:
        self.count += 1
        return self.layers / f"new{self.count}"

    async def create_called_off(self, instance: Instance) -> None:
        if await self.called_off(self.runtime.create(SandboxSpec("child", self.base, SMALL, hostname="child"))):
            assert "child" not in await self.runtime.list()

    async def fork_called_off(self, instance: Instance) -> None:
        if await self.called_off(self.runtime.create(copy_of(self.base, self.layer))):
            assert "child" not in await self.runtime.list()
        await self.alive(instance)

    async def destroy_during_create(self, instance: Instance) -> None:
        making = asyncio.ensure_future(self.runtime.create(copy_of(self.base, self.layer)))
        await self.wait()
        await self.runtime.destroy("child")
        with suppress(SandboxError):
            await making  # it may have won, or come after
        await self.runtime.destroy("child")
        await self.alive(instance)

    async def _destroyed_during(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(work)
        await self.wait()
        await self.runtime.destroy(NAME)
        with suppress(SandyardError):
            await task
        assert NAME not in await self.runtime.list()
        assert NAME not in await self.runtime.suspended()

    async def destroy_during_commit(self, instance: Instance) -> None:
        await self._destroyed_during(instance.commit(self.new(), memory=self.dice.random() < 0.7))

    async def destroy_during_suspend(self, instance: Instance) -> None:
        await self._destroyed_during(self.runtime.suspend(NAME))

    async def destroy_during_wake(self, instance: Instance) -> None:
        await self.runtime.suspend(NAME)
        await self._destroyed_during(self.runtime.wake(self.spec))

    async def two_wakes(self, instance: Instance) -> None:
        await self.runtime.suspend(NAME)
        answers = await asyncio.gather(*(self.runtime.wake(self.spec) for _ in range(2)), return_exceptions=True)
        (woken,) = [answer for answer in answers if isinstance(answer, Instance)]
        await self.alive(woken)

    async def wake_called_off(self, instance: Instance) -> None:
        await self.runtime.suspend(NAME)
        if await self.called_off(self.runtime.wake(self.spec)):
            assert await self.runtime.suspended() == [NAME]

    async def suspend_called_off(self, instance: Instance) -> None:
        await self.called_off(self.runtime.suspend(NAME))
        if await self.runtime.suspended():
            assert not self.runtime.host.layout.home(NAME).exists()
        else:
            await self.alive(instance)

    async def commit_called_off(self, instance: Instance) -> None:
        path = self.new()
        if await self.called_off(instance.commit(path, memory=True)):
            assert not path.exists()
        await self.alive(instance)

    async def suspend_during_commit(self, instance: Instance) -> None:
        path = self.new()
        committing = asyncio.ensure_future(instance.commit(path, memory=True))
        await asyncio.sleep(0)
        await self.runtime.suspend(NAME)
        assert await committing > 0
        if self.dice.random() < 0.5:
            await self.runtime.commit_halted(NAME, self.new(), memory=True)

    async def pause_during_commit(self, instance: Instance) -> None:
        committing = asyncio.ensure_future(instance.commit(self.new(), memory=True))
        await asyncio.sleep(0)
        pausing = asyncio.ensure_future(instance.pause())
        await asyncio.sleep(self.dice.uniform(0, 0.3))
        resuming = asyncio.ensure_future(instance.resume())
        await asyncio.gather(committing, pausing, resuming)
        await instance.resume()
        await self.alive(instance)

    async def adopt_during_commit(self, instance: Instance) -> None:
        committing = asyncio.ensure_future(instance.commit(self.new(), memory=True))
        await self.wait()
        assert await self.runtime.adopt(NAME) is instance
        with suppress(SandboxError):
            await committing
        await self.alive(instance)

    async def resume_called_off(self, instance: Instance) -> None:
        await instance.pause()
        if await self.called_off(instance.resume()):
            await instance.resume()
        await self.alive(instance)

    def _drop_layers(self) -> None:
        """Those of this race, each of which is whole."""
        found = list(self.layers.glob("new*"))
        for name in {path.name.partition(".")[0] for path in found}:
            parts = [path.name for path in found if path.name.startswith(f"{name}.")]
            assert image.exists(self.layers / name) or not parts, f"half a snapshot: {parts}"
            assert (self.layers / name).exists(), f"without its layer: {parts}"
        for path in found:
            path.unlink()

    async def nothing_else(self) -> None:
        """But for the sandbox itself."""
        end = time.monotonic() + _SETTLES
        while left := await asyncio.to_thread(self._left):  # a tool or a writer of a log ends
            assert time.monotonic() < end, left
            await asyncio.sleep(0.05)

    def _left(self) -> list[str]:
        host, layout = self.runtime.host, self.runtime.host.layout
        ready = {spare.name for spare in host.spares.ready()}
        found = [name for name in host.ids() if name != NAME]
        for parent in (layout.homes, layout.disks, layout.memories):
            names = [name for name in os.listdir(parent) if name not in {NAME, *ready}]
            found += [f"{parent.name}/{name}" for name in names if not name.startswith(".spares-")]
        found += [name for name in os.listdir(layout.bases) if name.startswith(".") and not name.endswith(".lock")]
        if layout.disk(NAME).is_dir():
            names = os.listdir(layout.disk(NAME))
            found += [name for name in names if not name.startswith("disk") and name not in ("conf.img", "blank.img")]
        machines = [line for line in leftovers(self.settings.paths.run.parent) if "qemu" in line]
        return found + machines[1 + len(ready) :]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.full)])
async def test_races_leave_all_or_nothing(
    runtime: MicroVMRuntime, settings: Settings, base: Rootfs, times: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    races = Races(runtime, settings, base, seed)
    await races.begin()
    kinds = list(races.kinds) * times
    races.dice.shuffle(kinds)
    before = 0
    for number, kind in enumerate(kinds):
        try:
            await races.round(kind)
        except (AssertionError, SandyardError) as error:
            raise AssertionError(f"race {number} of {len(kinds)}, {kind}, seed {seed}: {error}") from error
        if number == min(10, len(kinds) // 2):
            await runtime.destroy(NAME)
            await runtime.rest()
            before = await asyncio.to_thread(_descriptors)
    await runtime.destroy(NAME)
    await races.nothing_else()
    await runtime.rest()
    assert await asyncio.to_thread(_descriptors) <= before
    assert len(asyncio.all_tasks()) == 1, asyncio.all_tasks()
