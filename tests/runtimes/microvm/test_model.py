"""Any order of what is done to sandboxes with memory leaves each copy with the memory and the disk of its instant."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandyard.config import Settings
from sandyard.errors import SandboxError
from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.conformance.kit import Kit
from sandyard.runtimes.microvm import MicroVMRuntime, disks
from sandyard.runtimes.microvm.memory import capture, image, merging, sharing, suspending
from tests.runtimes.microvm import keeper
from tests.runtimes.microvm.test_memory import made, spec_of

pytestmark = [pytest.mark.root, pytest.mark.timeout(3600)]
# What it has in memory and what lies on the disk follow each other.
WRITER = "i=0; while :; do i=$((i+1)); echo $i >> /root/lines; sync /root/lines; sleep 0.1; done"
LAYERS = 4


@dataclass
class Twin:
    """What a guest has: the versions of its pages and blocks."""

    memory: list[int]
    blocks: list[int]

    def step(self, seed: int) -> None:
        for kept in (self.memory, self.blocks):
            for first, count, what in keeper.writes(seed, len(kept)):
                kept[first : first + count] = [what] * count

    def copy(self) -> Twin:
        return Twin([*self.memory], [*self.blocks])


class Model:
    """One sandbox after the other, each a copy of the one before or that itself."""

    def __init__(self, settings: Settings, base: Rootfs, layers: Path, seed: int) -> None:
        self.settings = settings
        self.base = base
        self.layers = layers
        self.dice = random.Random(seed)
        self.runtime = MicroVMRuntime(settings)
        self.twin = Twin([0] * keeper.PAGES, [0] * keeper.BLOCKS)
        self.snapshots: dict[Path, Twin] = {}
        self.count = 0
        self.name = "model"
        self.done: list[str] = []

    async def begin(self) -> None:
        self.sandbox, self.kit = await made(self.runtime, self.base, self.name)
        self.spec = self.sandbox.spec
        await self.kit.start(["/usr/bin/python3", "-c", keeper.program()])
        await self.kit.start(WRITER)
        await self.kit.output("while [ ! -p /run/told ]; do sleep 0.1; done")

    async def run(self, moves: int, until: float) -> None:
        chances: dict[Callable[[], Awaitable[None]], int] = {
            self.snapshot: 6,
            self.copied: 4,
            self.follow: 2,
            self.delete: 2,
            self.suspended: 4,
            self.paused: 2,
            self.files: 1,
            self.called_off: 2,
            self.another_server: 2,
            self.rest: 1,
        }
        for _ in range(moves):
            if time.monotonic() > until:
                break
            (move,) = self.dice.choices(list(chances), list(chances.values()))
            self.done.append(move.__name__)
            await self.step()
            await move()
        await self.check(self.kit, self.twin)
        for layer in [*self.snapshots]:
            await self.look(layer)

    async def end(self) -> None:
        for sandbox_id in await self.runtime.list():
            await self.runtime.destroy(sandbox_id)
        await self.runtime.close()

    async def step(self) -> None:
        self.count += 1
        assert await ask(self.kit, f"step {self.count}") == "done"
        self.twin.step(self.count)

    async def snapshot(self) -> None:
        layer = self.new_layer()
        await self.sandbox.commit(layer, memory=True, durable=self.dice.random() < 0.7)
        await self.keep(layer)

    async def suspended(self) -> None:
        await self.runtime.suspend(self.name)
        if self.dice.random() < 0.4:
            layer = self.new_layer()
            await self.runtime.commit_halted(self.name, layer, memory=True)
            await self.keep(layer)
        if self.dice.random() < 0.3:
            await self.restart()
        self.hold(await self.runtime.wake(self.spec))

    async def paused(self) -> None:
        await self.sandbox.pause()
        if self.dice.random() < 0.7:
            layer = self.new_layer()
            await self.sandbox.commit(layer, memory=True, durable=False)
            await self.keep(layer)
        await self.sandbox.resume()

    async def files(self) -> None:
        layer = self.new_layer()
        await self.sandbox.commit(layer)
        await asyncio.to_thread(layer.unlink)

    async def copied(self) -> None:
        if self.snapshots:
            await self.look(self.dice.choice([*self.snapshots]))

    async def follow(self) -> None:
        """A copy takes the place of what it is a copy of, or was made beside."""
        if not self.snapshots:
            return
        layer = self.dice.choice([*self.snapshots])
        await self.runtime.destroy(self.name)
        self.name = f"model{self.count}"
        made_of = spec_of(self.base, layer, self.name)
        self.hold(await self.runtime.create(made_of))
        self.spec, self.twin = self.sandbox.spec, self.snapshots[layer].copy()

    async def delete(self) -> None:
        if self.snapshots:
            await self.drop(self.dice.choice([*self.snapshots]))

    async def called_off(self) -> None:
        layer = self.new_layer()
        work = asyncio.ensure_future(self.sandbox.commit(layer, memory=True, durable=False))
        await asyncio.wait((work,), timeout=self.dice.uniform(0, 1.5))
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        if await asyncio.to_thread(image.exists, layer):
            await self.keep(layer)

    async def another_server(self) -> None:
        await self.restart()
        found = await self.runtime.adopt(self.name)
        assert found is not None
        self.hold(found)

    async def rest(self) -> None:
        await asyncio.sleep(3)  # what is free goes back to the host

    def new_layer(self) -> Path:
        return self.layers / f"layer{self.count}"

    async def keep(self, layer: Path) -> None:
        self.snapshots[layer] = self.twin.copy()
        if len(self.snapshots) > LAYERS:
            await self.drop(next(iter(self.snapshots)))

    async def drop(self, layer: Path) -> None:
        del self.snapshots[layer]
        await asyncio.to_thread(layer.unlink)
        await asyncio.to_thread(image.remove, layer)

    async def restart(self) -> None:
        await self.runtime.close()
        self.runtime = MicroVMRuntime(self.settings)

    def hold(self, instance: object) -> None:
        self.sandbox = instance  # type: ignore[assignment]
        self.kit = Kit(self.runtime, self.base, self.sandbox)

    async def look(self, layer: Path) -> None:
        copy = await self.runtime.create(spec_of(self.base, layer, "copy"))
        await self.check(Kit(self.runtime, self.base, copy), self.snapshots[layer])
        await self.runtime.destroy("copy")

    async def check(self, kit: Kit, twin: Twin) -> None:
        found = [int(word) for word in (await ask(kit, "check")).split()]
        expected = [*twin.memory, *twin.blocks]
        assert len(found) == len(expected)
        wrong = [(at, f, e) for at, (f, e) in enumerate(zip(found, expected, strict=True)) if f != e]
        assert not wrong, f"{len(wrong)} pages or blocks are not what they were: {wrong[:8]}"
        lines = [int(line) for line in (await kit.output("cat /root/lines")).split()]
        assert lines == list(range(1, len(lines) + 1)), "memory and disk are not of one instant"


async def ask(kit: Kit, word: str) -> str:
    return await kit.output(f"echo {word} > /run/ask; cat /run/told")


@pytest.mark.parametrize(("moves", "seconds"), [(8, 240), pytest.param(400, 600, marks=pytest.mark.full)])
async def test_each_copy_is_of_its_instant(
    settings: Settings, base: Rootfs, monkeypatch: pytest.MonkeyPatch, moves: int, seconds: int
) -> None:
    for module, name, value in (
        (disks, "DEEPEST", 3),
        (sharing, "MOST", 5),
        (suspending, "MOST", 5),
        (merging, "KEPT", 2),
        (capture, "MAX_DEPTH", 5),
    ):
        monkeypatch.setattr(module, name, value)
    layers = settings.paths.state / "model"
    shutil.rmtree(layers, ignore_errors=True)
    layers.mkdir(parents=True)
    seed = 5 if moves < 10 else random.randrange(1 << 32)
    print(f"seed {seed}")
    model = Model(settings, base, layers, seed)
    try:
        await model.begin()
        await model.run(moves, time.monotonic() + seconds)
    except (AssertionError, SandboxError) as error:
        raise AssertionError(f"seed {seed}, after {' '.join(model.done)}: {error}") from error
    finally:
        print(f"{len(model.done)} moves: {' '.join(model.done)}")
        await model.end()
