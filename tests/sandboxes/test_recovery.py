"""A server that starts where another one ended, in whatever state that left things."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import DeathReason, NotFound, SandboxDied
from sandyard.runtimes.base import Rootfs, SandboxSpec
from sandyard.runtimes.memory import MemoryRuntime

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


async def test_a_promised_sandbox_is_adopted_with_all_it_was_promised(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        lease = await yard.leases.create("t", 60, {})
        made = await yard.create(
            wanted(metadata={"a": "b"}, envs={"X": "1"}, lease_id=lease.id, idle_timeout=30.0, secured=False)
        )
    async with open_yard(runtime) as yard:
        found = yard.get("t", made.id)
        for name in ("template", "template_id", "resources", "started_at", "end_at", "metadata", "envs", "defaults"):
            assert getattr(found, name) == getattr(made, name), name
        assert (found.lease_id, found.idle_timeout, found.secured) == (lease.id, 30.0, False)
        assert yard.admission.count == 1
        await yard.drop_lease(yard.leases.get("t", lease.id))
        assert not runtime.instances


async def test_what_nobody_was_promised_is_destroyed(open_yard: OpenYard) -> None:
    runtime = MemoryRuntime()
    await runtime.create(SandboxSpec("leftover", Rootfs(layers=())))
    async with open_yard(runtime) as yard:
        assert not runtime.instances
        assert not yard.all()


async def test_what_died_meanwhile_is_known_to_be_dead(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted())
    await runtime.destroy(made.id)
    async with open_yard(runtime) as yard:
        with pytest.raises(SandboxDied) as caught:
            yard.get("t", made.id)
        assert caught.value.reason is DeathReason.HOST
        with pytest.raises(NotFound):
            yard.get("somebody", made.id)


async def test_a_lifetime_ends_though_the_server_was_down(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        made = await yard.create(wanted(timeout=0.3))
    await asyncio.sleep(0.35)
    async with open_yard(runtime) as yard:
        with pytest.raises(SandboxDied, match="timeout"):
            yard.get("t", made.id)
        assert not runtime.instances


async def test_a_lease_starts_anew_and_then_ends(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, keep=True) as yard:
        lease = await yard.leases.create("t", 0.5, {})
        made = await yard.create(wanted(lease_id=lease.id))
    async with open_yard(runtime) as yard:
        assert yard.get("t", made.id).lease_id == lease.id
        await until(lambda: not yard.all())
        with pytest.raises(SandboxDied, match="lease"):
            yard.get("t", made.id)


async def test_reasons_of_death_outlive_the_server(open_yard: OpenYard, wanted: Wanted, until: Until) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        made = await yard.create(wanted())
        await runtime.instances[made.id].die(DeathReason.OOM, "limit")
        await until(lambda: yard.admission.count == 0)
    async with open_yard(runtime) as yard:
        with pytest.raises(SandboxDied, match="oom"):
            yard.find(made.id)
