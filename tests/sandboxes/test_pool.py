"""The warm pool: there when wanted, out of the way otherwise."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sandyard.errors import CapacityError, CreateFailed, DeathReason
from sandyard.runtimes.base import Instance, Resources, Rootfs, SandboxSpec
from sandyard.runtimes.memory import MemoryInstance, MemoryRuntime
from sandyard.sandboxes import SandboxManager, admission, pool
from sandyard.sandboxes.admission import Admission
from sandyard.sandboxes.catalog import Build, Template

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


async def test_it_fills_to_its_low_mark_and_serves_from_there(
    open_yard: OpenYard, wanted: Wanted, until: Until
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=2) as yard:
        kinds: list[str] = []
        yard.on_create.append(lambda kind, _seconds: kinds.append(kind))
        await until(lambda: yard.pool.ready == 2)
        warm = set(runtime.instances)
        made = await yard.create(wanted())
        assert made.id in warm
        assert kinds == ["warm"]
        await until(lambda: yard.pool.ready == 2)


async def test_a_reservation_is_made_ahead_beyond_the_high_mark(
    open_yard: OpenYard, wanted: Wanted, until: Until
) -> None:
    async with open_yard(MemoryRuntime(), low=0, high=2) as yard:
        yard.reserve(yard.catalog.get("base"), 12)
        await until(lambda: yard.pool.ready == 12)
        kinds: list[str] = []
        yard.on_create.append(lambda kind, _seconds: kinds.append(kind))
        await asyncio.gather(*(yard.create(wanted()) for _ in range(12)))
        assert kinds == ["warm"] * 12


async def test_the_aim_follows_bursts_up_to_the_high_mark(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    async with open_yard(MemoryRuntime(), low=1, high=5) as yard:
        made = await asyncio.gather(*(yard.create(wanted()) for _ in range(9)))
        assert len({s.id for s in made}) == 9
        await until(lambda: yard.pool.ready == 5)


async def test_warm_ones_make_room_for_whoever_needs_it(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=2, max_count=2) as yard:
        await until(lambda: yard.pool.ready == 2)
        assert yard.capacity()["free"] == 2
        await yard.create(wanted())
        await yard.create(wanted())
        with pytest.raises(CapacityError):
            await yard.create(wanted())
        assert yard.admission.count == 2
        assert len(runtime.instances) == 2


async def test_a_place_that_is_being_filled_is_not_refused(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    class Slow(MemoryRuntime):
        async def create(self, spec: SandboxSpec) -> Instance:
            await asyncio.sleep(0.1)
            return await super().create(spec)

    async with open_yard(Slow(), low=1, max_count=1) as yard:
        await until(lambda: yard.admission.count == 1)
        assert yard.pool.ready == 0
        await yard.create(wanted())
        with pytest.raises(CapacityError):
            await yard.create(wanted())


async def test_a_warm_one_that_dies_is_replaced(open_yard: OpenYard, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=1) as yard:
        await until(lambda: yard.pool.ready == 1)
        [first] = runtime.instances
        await runtime.instances[first].die(DeathReason.CRASHED)
        await until(lambda: yard.pool.ready == 1 and first not in runtime.instances)
        assert yard.admission.count == 1


async def test_a_runtime_that_fails_is_not_hammered(open_yard: OpenYard) -> None:
    runtime = MemoryRuntime()
    runtime.fail_next.extend(CreateFailed("engine", "no") for _ in range(3))
    async with open_yard(runtime, low=1) as yard:
        await asyncio.sleep(0.2)
        assert len(runtime.fail_next) == 2
        assert yard.admission.count == 0


async def test_stopping_destroys_them(open_yard: OpenYard, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=3) as yard:
        await until(lambda: yard.pool.ready == 3)
    assert not runtime.instances


async def test_what_hangs_on_its_way_holds_up_no_other(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One template's reservation takes every place there is, and none of its sandboxes ever becomes ready."""
    monkeypatch.setattr(pool, "SLOW_SECONDS", 0.2)
    runtime = Hanging()
    async with open_yard(runtime, max_count=6) as yard:
        base = yard.catalog.get("base")
        hanging = replace(base, template_id="hangs-1", build_id="hangs-1", rootfs=Rootfs(layers=(), env={"HANG": "1"}))
        yard.reserve(hanging, 50)
        await until(lambda: runtime.hanging == 4)
        yard.reserve(base, 1)
        await until(lambda: yard.pool.ready == 1)
        async with asyncio.timeout(5):
            made = [await yard.create(wanted()) for _ in range(6)]
        assert len({sandbox.id for sandbox in made}) == 6
        with pytest.raises(CapacityError):
            await yard.create(wanted())
        await until(lambda: runtime.hanging == 0)
        assert set(runtime.instances) == {sandbox.id for sandbox in made}


class Hanging(MemoryRuntime):
    """Of some sandboxes it never says that they are there."""

    starts_at_once = 8
    hanging = 0

    async def create(self, spec: SandboxSpec) -> Instance:
        if "HANG" not in spec.rootfs.env:
            return await super().create(spec)
        self.hanging += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging -= 1
        raise AssertionError


class Clock:
    """Goes on only when told, and as slowly as it must for what waits on real time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    init = pool.WarmPool.__init__

    def started(self: pool.WarmPool, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named, clock=made)

    monkeypatch.setattr(pool.WarmPool, "__init__", started)
    return made


def _on(clock: Clock, yard: SandboxManager, seconds: float) -> None:
    clock.now += seconds
    yard.pool.reserve(yard.shelf(yard.catalog.get("base")), 0)  # it looks again


async def test_it_shrinks_when_bursts_do_not_come_back(
    open_yard: OpenYard, wanted: Wanted, until: Until, clock: Clock
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=1, high=20) as yard:
        for sandbox in await asyncio.gather(*(yard.create(wanted()) for _ in range(12))):
            await yard.kill(sandbox.id, DeathReason.KILLED)
        for seconds, size in ((1, 12), (300, 6), (300, 3), (300, 1), (90_000, 1)):
            _on(clock, yard, seconds)
            await until(lambda size=size: yard.pool.ready == size == len(runtime.instances))  # type: ignore[misc]
        assert yard.admission.count == 1
        assert yard.pool.evicted == 11


async def test_a_template_that_nobody_wants_any_more_costs_nothing(
    open_yard: OpenYard, wanted: Wanted, until: Until, clock: Clock
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=2) as yard:
        mine = await _template(yard, "mine", {"MINE": "1"})
        await yard.create(wanted("mine"))
        _on(clock, yard, 1)
        await until(lambda: yard.pool.ready == 4)
        _on(clock, yard, 3500)
        await asyncio.sleep(0.05)
        assert yard.pool.ready == 4
        _on(clock, yard, 200)
        await until(lambda: yard.pool.ready == 2)
        assert all("MINE" not in each.spec.rootfs.env for each in runtime.instances.values() if _warm(yard, each))
        assert mine.id in {template.id for template in yard.catalog.all("t")}


async def test_a_new_build_takes_the_place_of_the_old_one(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    """What waits of the old is ended, as many of the new wait at once, and a sandbox that runs goes on."""
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=1, high=9) as yard:
        mine = await _template(yard, "mine", {"VERSION": "1"})
        made = await asyncio.gather(*(yard.create(wanted("mine")) for _ in range(5)))

        def versions() -> list[str]:
            found = [i.spec.rootfs.env.get("VERSION", "") for i in runtime.instances.values() if _warm(yard, i)]
            return sorted(version for version in found if version)

        await until(lambda: versions() == ["1"] * 5)
        await _build(yard, mine, {"VERSION": "2"})
        await until(lambda: versions() == ["2"] * 5)
        assert all(sandbox.id in runtime.instances for sandbox in made)
        assert (await yard.create(wanted("mine"))).instance.spec.rootfs.env["VERSION"] == "2"


async def test_what_waits_takes_no_more_than_its_share_of_the_memory(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Admission, "budget_mb", 512 * 8)
    async with open_yard(MemoryRuntime(), low=1, high=20) as yard:
        await asyncio.gather(*(yard.create(wanted()) for _ in range(12)))
        await until(lambda: yard.pool.ready == 4)
        await asyncio.sleep(0.3)
        assert yard.pool.ready == 4
        yard.reserve(yard.catalog.get("base"), 6)  # that one was asked for
        await until(lambda: yard.pool.ready == 6)


async def test_what_is_too_much_goes_from_its_own_shelf(
    open_yard: OpenYard, wanted: Wanted, until: Until, clock: Clock
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, low=0, high=9) as yard:
        await _template(yard, "mine", {"MINE": "1"})
        await asyncio.gather(*(yard.create(wanted("mine")) for _ in range(2)))
        clock.now += 200
        await asyncio.gather(*(yard.create(wanted()) for _ in range(6)))
        _on(clock, yard, 1)
        await until(lambda: yard.pool.ready == 8)
        kept = {i.spec.sandbox_id for i in runtime.instances.values() if _warm(yard, i) and i.spec.rootfs.env["IMAGE"]}
        _on(clock, yard, 100)
        await until(lambda: yard.pool.ready == 7)
        assert kept <= runtime.instances.keys()


def _warm(yard: SandboxManager, instance: MemoryInstance) -> bool:
    return instance.spec.sandbox_id not in {sandbox.id for sandbox in yard.everyone()}


async def _template(yard: SandboxManager, name: str, env: dict[str, str]) -> Template:
    template = await yard.catalog.add_template("t", "template", [name])
    await _build(yard, template, env)
    return template


async def _build(yard: SandboxManager, template: Template, env: dict[str, str]) -> None:
    rootfs = Rootfs(layers=(), env={"IMAGE": "", **env})
    build = await yard.catalog.put_build(Build(str(uuid.uuid4()), template.id, "ready", rootfs, {}, 0.0))
    await yard.catalog.set_tags(template, build.id, ["default"])


async def test_what_stands_ready_goes_before_a_warm_one_and_before_a_refusal(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, ready = [4096], [200]

    class Ready(MemoryRuntime):
        def ready_bytes(self) -> int:
            return ready[0] << 20

        async def rest(self) -> None:
            free[0] += ready.pop()
            ready.append(0)

    monkeypatch.setattr(admission, "host_memory", lambda: (8192, free[0]))
    monkeypatch.setattr(admission, "_FRESH_SECONDS", 0.0)
    async with open_yard(Ready(), low=1) as yard:
        await until(lambda: yard.pool.ready == 1)
        free[0] = 100
        await yard.maker.make_room(Resources(memory_mb=64))
        yard.admission.release(Resources(memory_mb=64))
        assert (yard.pool.ready, yard.pool.evicted, free) == (1, 0, [300])
    async with open_yard(Ready()) as yard:
        free[0], ready[0] = 100, 200
        assert await yard.create(wanted())
        free[0], ready[0] = 50, 200
        with pytest.raises(CapacityError, match="the host has only 250 MiB of memory left"):
            await yard.create(wanted())
