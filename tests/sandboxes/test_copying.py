"""Snapshots, forks, and the layers they leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import BadRequest, CapacityError, Conflict, CreateFailed, DeathReason, NotFound, Unsupported
from sandyard.runtimes.base import MAX_LAYERS, Capabilities, Instance, SandboxSpec
from sandyard.runtimes.memory import MemoryRuntime
from sandyard.sandboxes import Sandbox, SandboxManager
from sandyard.sandboxes.model import TimeoutPolicy

if TYPE_CHECKING:
    from tests.sandboxes.conftest import OpenYard, Until, Wanted


async def read(sandbox: Sandbox, path: str) -> bytes:
    return b"".join([chunk async for chunk in sandbox.agent.read_file(path)])


def layers(yard: SandboxManager) -> int:
    home = yard.catalog.layers_home
    return len(list(home.iterdir())) if home.exists() else 0


async def test_a_snapshot_starts_any_number_of_sandboxes(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        await source.agent.write_file("/file", b"then")
        made = await yard.copying.snapshot(source, "state")
        await source.agent.write_file("/file", b"later")
        assert (made.id, made.source) == ("state:default", source.id)
        first, second = await yard.create(wanted("state")), await yard.create(wanted(made.id))
        await first.agent.write_file("/file", b"mine")
        assert await read(second, "/file") == b"then"
        assert await read(source, "/file") == b"later"
        assert first.resources == source.resources
    async with open_yard(runtime) as yard:  # it outlives everything
        assert [s.id for s in yard.copying.all("t")] == ["state:default"]
        assert await read(await yard.create(wanted("state:default")), "/file") == b"then"
        with pytest.raises(NotFound):
            await yard.create(wanted("state", tenant="other"))


async def test_a_name_taken_again_gets_the_newest_state(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        source = await yard.create(wanted())
        for text in (b"one", b"two"):
            await source.agent.write_file("/file", text)
            await yard.copying.snapshot(source, "state:v1" if text == b"one" else "state")
        assert await read(await yard.create(wanted("state:v1")), "/file") == b"one"
        assert await read(await yard.create(wanted("state")), "/file") == b"two"
        assert {s.id for s in yard.copying.all("t")} == {"state:default", "state:v1"}
        assert yard.copying.get("t", "state:v1").names == ["state:v1"]
        assert len(yard.catalog.find("state", "t").builds) == 2
        await yard.copying.snapshot(source, "state")
        assert len(yard.catalog.find("state", "t").builds) == 2  # what no tag names is dropped
        both = await asyncio.gather(yard.copying.snapshot(source, "new:a"), yard.copying.snapshot(source, "new:b"))
        assert both[0].template is both[1].template


async def test_names_are_checked_before_anything_happens(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        source = await yard.create(wanted())
        with pytest.raises(Conflict, match="base"):
            await yard.copying.snapshot(source, "base")
        for name in ("a b", "x:!", f"x:{source.id}".upper() + "!"):
            with pytest.raises(BadRequest):
                await yard.copying.snapshot(source, name)
        assert layers(yard) == 0


async def test_children_are_like_their_parent_and_apart(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        policy = TimeoutPolicy(auto_resume=True)
        source = await yard.create(wanted(metadata={"a": "b"}, envs={"X": "1"}, secured=False, policy=policy))
        await source.agent.write_file("/file", b"then")
        children = [child for child in await yard.copying.fork(source, 3, 30) if isinstance(child, Sandbox)]
        assert len({source.id, *(child.id for child in children)}) == 4
        for child in children:
            assert await read(child, "/file") == b"then"
            assert (child.metadata, child.envs, child.secured, child.policy) == ({"a": "b"}, {"X": "1"}, False, policy)
            assert child.end_at - child.started_at == pytest.approx(30)
            assert yard.get("t", child.id) is child
        assert yard.admission.count == 4
        await yard.kill(children[0].id, DeathReason.KILLED)
        assert await read(source, "/file") == b"then"


@pytest.mark.parametrize("memory", [True, False])
async def test_a_paused_sandbox_can_be_copied(open_yard: OpenYard, wanted: Wanted, memory: bool) -> None:
    async with open_yard(MemoryRuntime()) as yard:
        source = await yard.create(wanted())
        await source.agent.write_file("/file", b"then")
        await yard.pausing.pause(source, memory=memory)
        (child,) = await yard.copying.fork(source, 1, 30)
        assert isinstance(child, Sandbox)
        assert await read(child, "/file") == b"then"
        await yard.copying.snapshot(source, "state")
        assert await read(await yard.create(wanted("state")), "/file") == b"then"
        assert source.is_paused


async def test_each_fork_succeeds_or_fails_by_itself(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime, max_count=4) as yard:
        source = await yard.create(wanted())
        runtime.fail_next.append(CreateFailed("engine", "no luck"))
        children = await yard.copying.fork(source, 5, 30)
        kinds = sorted(type(child).__name__ for child in children)
        assert kinds.count("CreateFailed") == 1
        assert set(kinds) <= {"CapacityError", "CreateFailed", "Sandbox"}
        assert kinds.count("Sandbox") >= 2
        assert yard.admission.count == 1 + kinds.count("Sandbox")
        assert any(isinstance(child, CapacityError) for child in children)


class SlowCreates(MemoryRuntime):
    async def create(self, spec: SandboxSpec) -> Instance:
        await asyncio.sleep(0.1)
        return await super().create(spec)


async def test_a_fork_that_is_called_off_leaves_no_child(open_yard: OpenYard, wanted: Wanted) -> None:
    """However often: whoever waits for it may be called off once more while its children are undone."""
    runtime = SlowCreates()
    async with open_yard(runtime, high=0) as yard:
        source = await yard.create(wanted())
        fork = asyncio.ensure_future(yard.copying.fork(source, 2, 30))
        await asyncio.sleep(0.05)
        for _ in range(2):
            fork.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await fork
        await asyncio.sleep(0.2)
        assert yard.everyone() == [source]
        assert await runtime.list() == [source.id]


async def test_layers_go_with_whom_they_were_for(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandyard.sandboxes.manager.COLLECT_SECONDS", 0.01)
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        (child,) = await yard.copying.fork(source, 1, 30)
        assert isinstance(child, Sandbox)
        await yard.pausing.pause(child, memory=False)
        await asyncio.sleep(0.05)
        assert layers(yard) == 1  # a paused one needs it to boot
        await yard.pausing.resume(child, 30)
        await yard.kill(child.id, DeathReason.KILLED)
        await until(lambda: layers(yard) == 0)
        snapshot = await yard.copying.snapshot(source)
        boxes = [await yard.create(wanted(snapshot.id)) for _ in range(2)]
        await yard.catalog.delete(snapshot.template)
        await yard.pool.drop(snapshot.template.builds)
        await yard.kill(boxes[0].id, DeathReason.KILLED)
        await asyncio.sleep(0.05)
        assert layers(yard) == 1
        await yard.kill(boxes[1].id, DeathReason.KILLED)
        await until(lambda: layers(yard) == 0)


async def test_what_the_runtime_cannot_is_refused_before_anything_happens(open_yard: OpenYard, wanted: Wanted) -> None:
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        with pytest.raises(Unsupported, match="with its memory"):
            yard.copying.check(source, memory=True)
        runtime.capabilities = Capabilities()
        for work in (yard.copying.snapshot(source), yard.copying.fork(source, 1, 30)):
            with pytest.raises(Unsupported):
                await work
        assert layers(yard) == 0


async def test_half_a_snapshot_is_dropped_at_the_next_start(
    open_yard: OpenYard, wanted: Wanted, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed between the records of one."""
    monkeypatch.setattr("sandyard.sandboxes.manager.COLLECT_SECONDS", 0.01)
    runtime = MemoryRuntime()
    async with open_yard(runtime) as yard:
        source = await yard.create(wanted())
        whole = await yard.copying.snapshot(source, "whole")
        half, empty = await yard.copying.snapshot(source, "half"), await yard.copying.snapshot(source, "empty")
        await yard.catalog.drop_tags(half.template, ["default"])
        await yard.catalog.drop_build(empty.template, empty.build.id)
    async with open_yard(runtime) as yard:
        assert [template.name for template in yard.catalog.all("t") if template.kind == "snapshot"] == ["whole"]
        yard.collect_soon()
        await until(lambda: layers(yard) == 1)
        assert yard.copying.get("t", whole.id).build.rootfs == whole.build.rootfs


async def test_depth_has_a_limit(open_yard: OpenYard, wanted: Wanted) -> None:
    async with open_yard(MemoryRuntime(), max_count=200) as yard:
        deepest = await yard.create(wanted())
        for _ in range(MAX_LAYERS):
            (child,) = await yard.copying.fork(deepest, 1, 30)
            assert isinstance(child, Sandbox)
            deepest = child
        with pytest.raises(Unsupported, match="layers"):
            await yard.copying.fork(deepest, 1, 30)
