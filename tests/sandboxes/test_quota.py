"""What one tenant may hold, whatever it does at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import CapacityError, DeathReason
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import Sandbox, SandboxManager

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


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


async def test_what_deleted_snapshots_left_counts_while_others_need_it(
    open_yard: OpenYard, wanted: Wanted, until: Until
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        box = await yard.create(wanted())
        await box.agent.write_file("/noise", os.urandom(2 << 20))
        first = await yard.copying.snapshot(box)
        await box.agent.write_file("/small", b"x")
        second = await yard.copying.snapshot(box)
        (layer,) = first.build.rootfs.layers
        assert second.build.size_bytes < 1 << 20
        assert yard.runtime.needs(second.build.rootfs.layers[0]) == layer
        limit(yard, snapshots_mb=2)
        await yard.catalog.delete(first.template)
        with pytest.raises(CapacityError, match="snapshots_mb"):
            await yard.copying.snapshot(box)
        await until(lambda: not layer.exists())  # it is a part of the other now
        assert yard.quota.snapshot_bytes("t") > 2 << 20
        await yard.catalog.delete(second.template)
        assert yard.quota.snapshot_bytes("t") == 0


async def test_what_stands_below_ones_snapshots_and_is_anothers_does_not_count(
    open_yard: OpenYard, wanted: Wanted, tmp_path: Path
) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        made = await yard.copying.snapshot(await yard.create(wanted()))
        names = ("top", "step", "foreign", "left")
        with yard.catalog.new_layer() as path:
            top, step, foreign, left = (path.with_name(name) for name in names)
            for each in (top, step, foreign, left):
                each.write_bytes(b'{"parent": null, "files": [], "paths": []}' + b" " * (1 << 20))
            elsewhere = tmp_path / "tree"
            elsewhere.write_bytes(bytes(1 << 20))
            before = yard.quota.snapshot_bytes("t")
            mine = replace(made.build.rootfs, layers=[*made.build.rootfs.layers, top, step, foreign, left, elsewhere])
            for tenant, kind, layers in (("t", "template", [top, step]), ("u", "snapshot", [foreign, left])):
                template = await yard.catalog.add_template(tenant, kind)
                theirs = replace(mine, layers=layers)
                await yard.catalog.put_build(replace(made.build, id=kind, template_id=template.id, rootfs=theirs))
            await yard.catalog.put_build(replace(made.build, rootfs=mine))
            assert 1 << 20 <= yard.quota.snapshot_bytes("t") - before < 3 << 19


class SharingRuntime(MemoryRuntime):
    """Layers that share: `held` of all together."""

    held = 0

    def held_bytes(self, layers: Collection[Path], others: Collection[Path]) -> int | None:
        assert not set(layers) & set(others)
        return self.held if layers else 0


async def test_what_snapshots_share_is_for_the_runtime_to_say(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = SharingRuntime()
    async with open_yard(runtime) as yard:
        limit(yard, snapshots_mb=2)
        box = await yard.create(wanted())
        first = await yard.copying.snapshot(box)
        await yard.catalog.put_build(replace(first.build, size_bytes=8 << 20))  # as it was when it was made
        await yard.copying.snapshot(box)
        runtime.held = 2 << 20
        with pytest.raises(CapacityError, match="take 2 MiB, of 2"):
            await yard.copying.snapshot(box)
