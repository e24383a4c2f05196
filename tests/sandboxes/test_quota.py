"""What one tenant may hold, whatever it does at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import CapacityError, DeathReason
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import Sandbox, SandboxManager

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Wanted


def limit(yard: SandboxManager, *, per_tenant: int = 0, snapshots_mb: int = 0) -> None:
    sizes = yard.settings.sandbox.model_copy(update={"per_tenant": per_tenant, "snapshots_mb": snapshots_mb})
    yard.settings = yard.settings.model_copy(update={"sandbox": sizes})


async def test_a_tenant_has_no_more_sandboxes_than_it_may(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        limit(yard, per_tenant=3)
        made = await asyncio.gather(*(yard.create(wanted()) for _ in range(8)), return_exceptions=True)
        mine = [each for each in made if isinstance(each, Sandbox)]
        assert len(mine) == 3
        assert sum(isinstance(each, CapacityError) for each in made) == 5
        await yard.create(wanted(tenant="other"))
        await yard.pausing.pause(mine[0])  # it is still there
        with pytest.raises(CapacityError, match="per_tenant"):
            await yard.create(wanted())
        await yard.kill(mine[1].id, DeathReason.KILLED)
        children = await yard.copying.fork(mine[2], 4, 60)
        assert [isinstance(child, Sandbox) for child in children].count(True) == 1
        assert len(yard.everyone("t")) == 3


async def test_a_create_that_fails_counts_no_more(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime(), max_count=1) as yard:
        limit(yard, per_tenant=1)
        other = await yard.create(wanted(tenant="other"))
        with pytest.raises(CapacityError, match="max_count"):
            await yard.create(wanted())
        await yard.kill(other.id, DeathReason.KILLED)
        await yard.create(wanted())


async def test_the_snapshots_of_a_tenant_take_no_more_than_they_may(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        limit(yard, snapshots_mb=2)
        box, other = await yard.create(wanted()), await yard.create(wanted(tenant="other"))
        first = await yard.copying.snapshot(box)
        await yard.catalog.put_build(replace(first.build, size_bytes=2 << 20))
        with pytest.raises(CapacityError, match="snapshots_mb"):
            await yard.copying.snapshot(box)
        await yard.copying.snapshot(other)
        await yard.catalog.delete(first.template)
        again = await asyncio.gather(*(yard.copying.snapshot(box) for _ in range(2)), return_exceptions=True)
        assert sum(isinstance(each, CapacityError) for each in again) == 1  # the other may come to all of it
