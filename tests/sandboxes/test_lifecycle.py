"""Create, find, expire, kill: what callers see of a sandbox's life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import (
    BadRequest,
    CapacityError,
    CreateFailed,
    DeathReason,
    NotFound,
    SandboxDied,
    SandboxError,
)
from sandyard.runtimes.base import Instance, SandboxSpec
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import stragglers

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


async def test_a_sandbox_is_found_by_its_tenant_only(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        made = await yard.create(wanted(metadata={"a": "b"}))
        assert yard.get("t", made.id) is made
        assert made.defaults.env == {"IMAGE": "1"}
        with pytest.raises(NotFound, match=made.id):
            yard.get("somebody", made.id)
        assert not yard.all("somebody")


async def test_an_unknown_template_is_named_with_near_names(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        with pytest.raises(NotFound, match="'bsae' not found; did you mean base"):
            await yard.create(wanted("bsae"))


async def test_it_dies_at_the_end_of_its_lifetime(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted(timeout=0.05))
        await until(lambda: made.id not in runtime.instances)
        with pytest.raises(SandboxDied) as caught:
            yard.get("t", made.id)
        assert caught.value.reason is DeathReason.TIMEOUT


async def test_connect_extends_but_never_shortens(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        made = await yard.create(wanted(timeout=60))
        end = made.end_at
        await yard.set_timeout(made, 5, only_extend=True)
        assert made.end_at == end
        await yard.set_timeout(made, 120, only_extend=True)
        assert made.end_at > end + 50
        await yard.set_timeout(made, 0)
        with pytest.raises(SandboxDied, match="timeout"):
            yard.get("t", made.id)


async def test_idle_sandboxes_die_and_busy_ones_do_not(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        idle = await yard.create(wanted(idle_timeout=0.1))
        busy = await yard.create(wanted(idle_timeout=0.1))
        busy.streams += 1
        await until(lambda: idle.death is not None)
        await asyncio.sleep(0.2)
        assert busy.death is None
        assert idle.death is not None
        assert "idle" in idle.death.detail
        busy.streams -= 1
        await until(lambda: busy.death is not None)


async def test_the_runtime_s_reason_of_death_is_kept(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await runtime.instances[made.id].die(DeathReason.OOM, "memory limit")
        await until(lambda: yard.admission.count == 0)
        with pytest.raises(SandboxDied, match=r"oom \(memory limit\)"):
            yard.find(made.id)


async def test_two_kills_do_the_work_once(open_yard: OpenYard, wanted: Wanted) -> None:
    destroyed: list[str] = []

    class Counting(MemoryRuntime):
        async def destroy(self, sandbox_id: str) -> None:
            destroyed.append(sandbox_id)
            await asyncio.sleep(0.02)
            await super().destroy(sandbox_id)

    async with open_yard(Counting()) as yard:
        made = await yard.create(wanted())
        await asyncio.gather(*(yard.kill(made.id, reason) for reason in (DeathReason.KILLED, DeathReason.LEASE)))
        await yard.kill(made.id, DeathReason.KILLED)
        assert destroyed == [made.id]
        with pytest.raises(SandboxDied, match="killed"):
            yard.find(made.id)


async def test_a_cancelled_caller_leaves_no_sandbox(open_yard: OpenYard, wanted: Wanted) -> None:
    class Slow(MemoryRuntime):
        async def create(self, spec: SandboxSpec) -> Instance:
            await asyncio.sleep(0.05)
            return await super().create(spec)

    runtime = Slow()
    async with open_yard(runtime) as yard:
        task = asyncio.create_task(yard.create(wanted()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert yard.admission.count == 0
        assert not runtime.instances


async def test_a_failed_create_gives_its_place_back(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, max_count=1) as yard:
        runtime.fail_next.append(CreateFailed("engine", "no"))
        with pytest.raises(CreateFailed, match="engine"):
            await yard.create(wanted())
        await yard.create(wanted())
        assert yard.admission.count == 1


async def test_a_full_yard_says_why_and_when_to_retry(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime(), max_count=2) as yard:
        first = await yard.create(wanted(timeout=5))
        await yard.create(wanted())
        with pytest.raises(CapacityError, match="all 2 places are taken") as caught:
            await yard.create(wanted())
        assert 1 <= caught.value.retry_after <= 5
        assert yard.capacity()["free"] == 0
        assert yard.capacity()["reasonsIfZero"]
        await yard.kill(first.id, DeathReason.KILLED)
        await yard.create(wanted())


async def test_sweep_kills_by_label_within_the_tenant(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        mine = await yard.create(wanted(metadata={"run": "1", "x": "y"}))
        other = await yard.create(wanted(metadata={"run": "2"}))
        theirs = await yard.create(wanted(tenant="u", metadata={"run": "1"}))
        assert await yard.sweep("t", {"run": "1"}) == [mine.id]
        assert {s.id for s in yard.all()} == {other.id, theirs.id}


async def test_what_cannot_be_destroyed_keeps_its_place_until_it_is(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = [True]

    class Stubborn(MemoryRuntime):
        async def destroy(self, sandbox_id: str) -> None:
            if refusing:
                raise SandboxError(f"sandbox {sandbox_id}: its cgroup is not empty")
            await super().destroy(sandbox_id)

    monkeypatch.setattr(stragglers, "RETRY_SECONDS", 0.02)
    async with open_yard(Stubborn()) as yard:
        made = await yard.create(wanted())
        with pytest.raises(SandboxError, match="not empty"):
            await yard.kill(made.id, DeathReason.KILLED)
        assert yard.admission.count == 1
        with pytest.raises(SandboxDied):
            yard.find(made.id)
        refusing.clear()
        await until(lambda: yard.admission.count == 0)


async def test_a_lease_that_is_not_renewed_takes_its_sandboxes_along(
    open_yard: OpenYard, wanted: Wanted, until: Until
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        lease = await yard.leases.create("t", 0.4, {"run": "1"})
        held = await yard.create(wanted(lease_id=lease.id))
        free = await yard.create(wanted())
        for _ in range(6):
            await asyncio.sleep(0.1)
            yard.leases.renew("t", lease.id)
        assert held.death is None
        await until(lambda: len(yard.all()) == 1)
        with pytest.raises(SandboxDied) as caught:
            yard.find(held.id)
        assert caught.value.reason is DeathReason.LEASE
        assert yard.find(free.id) is free
        with pytest.raises(NotFound, match=lease.id):
            yard.leases.renew("t", lease.id)
        with pytest.raises(BadRequest, match=lease.id):
            await yard.create(wanted(lease_id=lease.id))


async def test_ending_a_lease_kills_now_and_belongs_to_its_tenant(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        lease = await yard.leases.create("t", 60, {})
        await yard.create(wanted(lease_id=lease.id))
        with pytest.raises(NotFound):
            yard.leases.get("u", lease.id)
        await yard.drop_lease(yard.leases.get("t", lease.id))
        assert not yard.all()
        assert not await yard.store.leases()
