"""Snapshots of one sandbox, one after another: what they need stays, what nobody needs goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sandyard.errors import DeathReason
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import Sandbox, SandboxManager
from sandyard.sandboxes.copying import Snapshot

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Wanted


async def _read(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([chunk async for chunk in sandbox.agent.read_file(path)])


async def _taken(yard: SandboxManager, source: Sandbox, count: int) -> list[Snapshot]:
    made = []
    for number in range(count):
        await source.agent.write_file("/last", str(number).encode())
        await source.agent.write_file(f"/file{number}", b"x")
        made.append(await yard.copying.snapshot(source))
    return made


def _layers(yard: SandboxManager) -> set[Path]:
    return set(yard.catalog.layers_home.iterdir())


async def _tidy(yard: SandboxManager) -> None:
    for _ in range(3):
        await yard.catalog.collect(yard.layers_in_use(), yard.runtime)
        await yard.catalog.compact(yard.layers_in_use(), yard.runtime)


async def test_what_a_deleted_one_was_needed_for_becomes_the_own_of_who_needs_it(
    open_yard: OpenYard, wanted: Wanted
) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        made = await _taken(yard, source, 5)
        assert len(_layers(yard)) == 5
        for snapshot in (made[1], made[2]):
            await yard.catalog.delete(snapshot.template)
        await _tidy(yard)
        kept = [made[number].build.rootfs.layers[0] for number in (0, 3, 4)]
        assert _layers(yard) == set(kept)
        assert runtime.needs(kept[1]) == kept[0]
        for number in (0, 3, 4):
            copy = await yard.create(wanted(made[number].id))
            assert await _read(copy, "/last") == str(number).encode()
            assert await _read(copy, f"/file{number}") == b"x"
            await yard.kill(copy.id, DeathReason.KILLED)
        for number in (0, 3, 4):
            await yard.catalog.delete(made[number].template)
        await yard.pool.drop([snapshot.build.id for snapshot in made])
        await _tidy(yard)
        assert _layers(yard) == set()


async def test_below_what_is_in_use_nothing_is_merged(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        source = await yard.create(wanted())
        made = await _taken(yard, source, 3)
        copy = await yard.create(wanted(made[2].id))
        for snapshot in made:
            await yard.catalog.delete(snapshot.template)
        await _tidy(yard)
        assert len(_layers(yard)) == 3
        assert await _read(copy, "/last") == b"2"
        await yard.pool.drop([snapshot.build.id for snapshot in made])
        await yard.kill(copy.id, DeathReason.KILLED)
        await _tidy(yard)
        assert _layers(yard) == set()


async def test_what_a_merge_shed_stays_while_a_snapshot_is_on_its_way(open_yard: OpenYard, wanted: Wanted) -> None:
    """It may have looked at the chain before, and be kept as the difference to what goes."""
    async with open_yard(MemoryRuntime()) as yard:
        source = await yard.create(wanted())
        made = await _taken(yard, source, 3)
        for snapshot in made[:2]:
            await yard.catalog.delete(snapshot.template)
        with yard.catalog.new_layer():
            await _tidy(yard)
            assert len(_layers(yard)) == 3
        await _tidy(yard)
        assert len(_layers(yard)) == 1


async def test_who_has_several_children_is_kept_for_them(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        made = await _taken(yard, source, 3)
        with yard.catalog.new_layer() as beside:
            await source.instance.commit(beside, parent=made[0].build.rootfs.layers[0])
            build = made[1].build
            rootfs = type(build.rootfs)([beside, *build.rootfs.layers[1:]])
            await yard.catalog.put_build(type(build)("b2", made[1].template.id, "ready", rootfs, {}, 0.0))
        await yard.catalog.delete(made[0].template)
        await _tidy(yard)
        assert len(_layers(yard)) == 4
        assert runtime.needs(beside) == made[0].build.rootfs.layers[0]
        assert await yard.catalog.collect(yard.layers_in_use(), runtime) == []
