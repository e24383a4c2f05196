"""A snapshot of one node, started on another that has the same storage only."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import CapacityError, Conflict, HostError, NotFound, Unsupported
from sandyard.runtimes.room import check_room
from sandyard.sandboxes import SandboxManager
from sandyard.store.blobs import BlobDamaged, BlobError, BlobMissing, BlobUnreachable, Content
from sandyard.store.blobs.memory import MemoryBlobs
from tests.sandboxes.remote.conftest import read, remote_of, start

if TYPE_CHECKING:
    from tests.sandboxes.remote.conftest import OpenNode

NOISE = os.urandom(300_000)


async def _pushed(node: SandboxManager, content: bytes = NOISE, name: str | None = None) -> str:
    source = await start(node)
    await source.agent.write_file("/noise", content)
    made = await node.copying.snapshot(source, name)
    await remote_of(node).push(made)
    return made.id


def _layers(node: SandboxManager) -> list[str]:
    home: Path = node.catalog.layers_home
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


async def test_another_node_starts_it_by_id_and_by_name(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        await source.agent.write_file("/noise", NOISE)
        plain = await a.copying.snapshot(source)
        named = await a.copying.snapshot(source, "Team/State:v2")
        for each in (plain, named):
            await remote_of(a).push(each)
        by_id = await start(b, plain.id)
        assert await read(by_id, "/noise") == NOISE
        assert by_id.defaults.env == source.defaults.env  # of the node that made it
        assert await read(await start(b, "state:v2"), "/noise") == NOISE
        assert {s.id for s in b.copying.all("t")} == {plain.id, "state:v2"}
        assert {s.source for s in b.copying.all("t")} == {source.id}
        assert await read(await start(b, f"{named.template.id}:v2"), "/noise") == NOISE
    async with open_node("b", blobs) as b:  # it is b's own now
        blobs.objects.clear()
        assert await read(await start(b, plain.id), "/noise") == NOISE


async def test_tenants_see_their_own_only(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a, name="state")
        assert await remote_of(b).list("other") == []
        for name in (made, "state", "state:default"):
            with pytest.raises(NotFound):
                await start(b, name, tenant="other")
        with pytest.raises(NotFound):
            await remote_of(b).remove("other", made)
        assert [each.manifest.id for each in await remote_of(b).list("t")] == [made]


@pytest.mark.parametrize("tenant", ["Ä b/c", "../t", "T"])
async def test_strange_tenants_have_folders_of_their_own(open_node: OpenNode, blobs: MemoryBlobs, tenant: str) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await a.copying.snapshot(await start(a, tenant=tenant))
        await remote_of(a).push(made)
        assert await remote_of(b).list("t") == []
        assert (await start(b, made.id, tenant=tenant)).tenant == tenant


async def test_the_second_upload_sends_what_is_new(open_node: OpenNode) -> None:
    blobs = Flaky()
    async with open_node("a", blobs) as a:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(3_000_000))
        first = await remote_of(a).push(await a.copying.snapshot(source))
        assert first.moved_bytes > 2_900_000
        stored = sum(len(data) for key, (data, _) in blobs.objects.items() if key.startswith("chunks/"))
        assert first.moved_bytes == stored
        again = await remote_of(a).push(a.copying.all("t")[0])
        assert again.moved_bytes == 0
        await source.agent.write_file("/zz", os.urandom(20_000))
        second = await remote_of(a).push(await a.copying.snapshot(source))
        assert 20_000 < second.moved_bytes < 40_000  # a difference to the first
        other = await start(a)  # with a disk of its own, which holds the same
        await other.agent.write_file("/noise", await read(source, "/noise"))
        third = await remote_of(a).push(await a.copying.snapshot(other))
        assert third.skipped_bytes > 3_500_000
        assert third.moved_bytes < 200_000


class Flaky(MemoryBlobs):
    """Fails after so many puts, until it is repaired."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 10**9
        self.puts: list[str] = []

    async def put(self, key: str, content: Content) -> int:
        if self.left <= 0:
            raise BlobUnreachable("the storage is away")
        self.left -= 1
        self.puts.append(key)
        await asyncio.sleep(0)
        return await super().put(key, content)


async def test_an_upload_that_was_cut_is_invisible_and_goes_on(open_node: OpenNode) -> None:
    blobs = Flaky()
    async with open_node("a", blobs, concurrency=2) as a, open_node("b", blobs) as b:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(2_000_000))
        made = await a.copying.snapshot(source)
        blobs.left = 12
        with pytest.raises(BlobUnreachable):
            await remote_of(a).push(made)
        assert await remote_of(b).list("t") == []
        sent = [key for key in blobs.puts if key.startswith("chunks/")]
        assert len(sent) >= 5
        blobs.left = 10**9
        await remote_of(a).push(made)
        assert len({*blobs.puts}) == len([key for key in blobs.puts])  # nothing was sent twice
        assert blobs.puts[-1].startswith("snapshots/")
        assert await read(await start(b, made.id), "/noise") == await read(source, "/noise")


async def _refused(node: SandboxManager, made: str, match: str) -> None:
    with pytest.raises((BlobDamaged, BlobMissing), match=match):
        await start(node, made)
    assert node.copying.all("t") == []
    assert _layers(node) == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign", "gone", "empty", "longer"])
async def test_a_bad_chunk_is_refused_by_name(open_node: OpenNode, blobs: MemoryBlobs, damage: str) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        chunks = sorted(key for key in blobs.objects if key.startswith("chunks/"))
        key, other = chunks[2], chunks[3]
        data, at = blobs.objects[key]
        changed = {
            "flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
            "cut": data[:-1],
            "foreign": blobs.objects[other][0],
            "empty": b"",
            "longer": data + data * 9,
        }
        if damage == "gone":
            del blobs.objects[key]
        else:
            blobs.objects[key] = (changed[damage], at)
        await _refused(b, made, key.rpartition("/")[2])
        blobs.objects[key] = (data, at)
        assert await read(await start(b, made), "/noise") == NOISE


@pytest.mark.parametrize("kind", ["layers", "snapshots"])
async def test_a_bad_manifest_is_refused(open_node: OpenNode, blobs: MemoryBlobs, kind: str) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        (key,) = [key for key in blobs.objects if key.startswith(f"{kind}/")]
        data, at = blobs.objects[key]
        for bad in (data.replace(b'"size', b'"sise'), data[:-5], b"", b"[]", b"\xff", b'{"a":' * 5000):
            blobs.objects[key] = (bad, at)
            with pytest.raises((BlobError, NotFound)):
                await start(b, made)
            assert _layers(b) == []
        blobs.objects[key] = (data, at)
        assert await read(await start(b, made), "/noise") == NOISE


async def test_no_chunk_is_written_after_its_file_is_closed(
    open_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, written = threading.Event(), list[str]()

    class OneGone(MemoryBlobs):
        """Of two chunks the second is gone as soon as the first is being written."""

        broken = False
        asked = 0

        async def stream(self, key: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
            if self.broken and key.startswith("chunks/"):
                self.asked += 1
                if self.asked > 1:
                    await asyncio.to_thread(begun.wait, 10)
                    raise BlobMissing(f"there is no {key}")
            async for piece in super().stream(key, start, length):
                yield piece

    def slowly(descriptor: int, offset: int, data: bytes) -> None:
        begun.set()
        time.sleep(0.3)
        try:
            written.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError as error:
            written.append(str(error))

    blobs = OneGone()
    async with open_node("a", blobs) as a, open_node("b", blobs, concurrency=2) as b:
        made = await _pushed(a)
        monkeypatch.setattr("sandyard.sandboxes.remote.download._write", slowly)
        blobs.broken = True
        with pytest.raises(BlobError):
            await start(b, made)
        assert len(written) == 1  # nobody writes any more
        assert written[0].split(" ")[0].endswith(".part")
        assert _layers(b) == []


async def test_another_tenants_snapshot_under_ones_own_folder_is_refused(
    open_node: OpenNode, blobs: MemoryBlobs
) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        (key,) = [key for key in blobs.objects if key.startswith("snapshots/")]
        blobs.objects[key.replace("/t-t/", "/t-other/")] = blobs.objects[key]
        assert await remote_of(b).list("other") == []
        with pytest.raises(NotFound):
            await start(b, made, tenant="other")


async def test_many_at_once_fetch_once(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        boxes = await asyncio.gather(*(start(b, made) for _ in range(6)))
        assert {await read(box, "/noise") for box in boxes} == {NOISE}
        (transfer,) = remote_of(b).transfers("t")
        assert (transfer.state, transfer.done_bytes) == ("done", transfer.total_bytes)
        assert len(_layers(b)) == 1


async def test_one_who_gives_up_does_not_stop_the_others(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        impatient = asyncio.create_task(start(b, made))
        patient = asyncio.create_task(start(b, made))
        await _until(lambda: bool(remote_of(b).transfers("t")), step=0)
        impatient.cancel()
        assert await read(await patient, "/noise") == NOISE


async def test_a_newer_state_of_a_name_comes_by_pull(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        await _pushed(a, b"one", "state")
        assert await read(await start(b, "state"), "/noise") == b"one"
        await _pushed(a, b"two", "state")
        assert await read(await start(b, "state"), "/noise") == b"one"
        await remote_of(b).pull("t", "state")
        assert await read(await start(b, "state"), "/noise") == b"two"
        assert [s.id for s in b.copying.all("t")] == ["state:default"]


async def test_a_name_that_is_taken_here_stays_what_it_is(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        await _pushed(a, b"theirs", "state")
        mine = await start(b)
        await mine.agent.write_file("/noise", b"mine")
        await b.copying.snapshot(mine, "state")
        pulled = await remote_of(b).pull("t", "state")
        assert pulled.id == f"{pulled.template.id}:default"
        assert await read(await start(b, "state"), "/noise") == b"mine"
        assert await read(await start(b, pulled.id), "/noise") == b"theirs"


async def test_a_name_is_no_id(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        made = await a.copying.snapshot(source)
        await remote_of(a).push(made)
        taken = made.template.id
        for tenant in ("other", "t"):
            await b.catalog.add_template(tenant, "template", [taken])
        await remote_of(b).pull("t", taken)
        found = b.catalog.by_id(taken)
        assert found is not None
        assert (found.tenant, found.kind) == ("t", "snapshot")
        assert [each.here for each in await remote_of(b).list("t")] == [True]
        await b.catalog.delete(found)
        assert b.catalog.by_id(taken) is None
        await remote_of(b).pull("t", taken)
        with pytest.raises(Conflict, match="already"):
            await b.catalog.add_template("other", "template", template_id=taken)
        assert b.catalog.by_id(taken) is not None


async def test_an_upload_does_not_take_a_name_for_its_snapshot(open_node: OpenNode) -> None:
    blobs = Flaky()
    async with open_node("a", blobs, upload="on_snapshot") as a:
        early = await a.catalog.add_template("other", "template", ["early"])
        source = await start(a)
        blobs.left = 0
        made = await a.copying.snapshot(source)
        early.names.append(made.template.id)
        await _until(lambda: remote_of(a).transfers("t")[0].error is not None)
        assert "away" in (remote_of(a).transfers("t")[0].error or "")  # and not that it was deleted


async def test_uploads_by_policy(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs, upload="sync") as a, open_node("b", blobs) as b:
        made = await a.copying.snapshot(await start(a))
        assert [each.manifest.id for each in await remote_of(b).list("t")] == [made.id]
    async with open_node("c", blobs, upload="on_snapshot") as c:
        made = await c.copying.snapshot(await start(c))
        await _until(lambda: remote_of(c).transfers("t")[0].state == "done")
        assert made.id in [each.manifest.id for each in await remote_of(c).list("t")]
    async with open_node("d", blobs) as d:
        await d.copying.snapshot(await start(d))
        assert remote_of(d).transfers("t") == []


async def test_a_promised_upload_is_kept_by_the_next_server(open_node: OpenNode) -> None:
    blobs = Flaky()
    async with open_node("a", blobs, upload="on_snapshot") as a:
        source = await start(a)
        blobs.left = 0
        made = await a.copying.snapshot(source)
        gone = await a.copying.snapshot(source)
        await _until(lambda: {each.state for each in remote_of(a).transfers("t")} == {"failed"})
        assert "away" in (remote_of(a).transfers("t")[0].error or "")
        await a.catalog.delete(gone.template)
    blobs.left = 10**9
    async with open_node("a", blobs, upload="on_snapshot") as a:
        await _until(lambda: [each.state for each in remote_of(a).transfers("t")] == ["done"])
        assert [each.manifest.id for each in await remote_of(a).list("t")] == [made.id]
    async with open_node("a", blobs) as a:
        assert remote_of(a).transfers("t") == []


async def test_a_sync_upload_that_fails_says_where_the_snapshot_is(open_node: OpenNode) -> None:
    blobs = Flaky()
    async with open_node("a", blobs, upload="sync") as a:
        source = await start(a)
        blobs.left = 0
        with pytest.raises(BlobError, match="is on this node, and could not be uploaded: the storage is away"):
            await a.copying.snapshot(source)
        assert len(a.copying.all("t")) == 1


async def test_a_full_disk_leaves_nothing(
    open_node: OpenNode, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("sandyard.sandboxes.remote.download.os.pwrite", full)
            with pytest.raises(HostError, match="No space left on device"):
                await start(b, made)
        assert _layers(b) == []
        with monkeypatch.context() as patch:
            patch.setattr("sandyard.sandboxes.remote.download.check_room", partial(check_room, reserve=1 << 60))
            with pytest.raises(HostError, match="no room"):
                await start(b, made)
        assert await read(await start(b, made), "/noise") == NOISE


async def test_quota_and_runtime_are_heeded(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs, sandbox={"snapshots_mb": 1}) as b:
        made = await _pushed(a)
        mine = await start(b)
        await mine.agent.write_file("/big", os.urandom(2 << 20))
        await b.copying.snapshot(mine)
        with pytest.raises(CapacityError, match="snapshots_mb"):
            await start(b, made)
        large = await _pushed(a, os.urandom(2 << 20))
    async with open_node("d", blobs, sandbox={"snapshots_mb": 2}) as d:
        with pytest.raises(CapacityError, match=r"3 MiB more are wanted \(sandbox.snapshots_mb"):
            await start(d, large)
        assert _layers(d) == []
        assert await read(await start(d, made), "/noise") == NOISE
    async with open_node("c", blobs) as c:
        c.runtime.name = "other"
        with pytest.raises(Conflict, match="runtime memory"):
            await start(c, made)


async def test_a_layer_of_that_name_that_is_another_is_refused(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        name = _layers(a)[0]
        with b.catalog.new_layer(name) as path:
            path.write_bytes(b'{"parent": null, "files": [], "paths": []}')
            with pytest.raises(BlobDamaged, match="another than the one of that name here"):
                await start(b, made)
            path.unlink()
            path.write_bytes((a.catalog.layers_home / name).read_bytes())  # the same, and nothing is known of it
            assert await read(await start(b, made), "/noise") == NOISE
        assert remote_of(b).transfers("t")[0].moved_bytes == 0


async def _until(true: Callable[[], bool], seconds: float = 10.0, step: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(step)


async def test_a_link_to_nothing_is_no_layer(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        made = await _pushed(a)
        with b.catalog.new_layer(_layers(a)[0]) as path:
            path.symlink_to(path.with_name("nothing"))
            assert await read(await start(b, made), "/noise") == NOISE
        assert not path.is_symlink()


async def test_layers_are_removed_by_several_at_once(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as node:
        home = node.catalog.layers_home
        for number in range(40):
            (home / f"tree{number}" / "folder").mkdir(parents=True)
            for name in range(20):
                (home / f"tree{number}" / "folder" / str(name)).write_bytes(b"x")
        found = await asyncio.gather(*(node.catalog.collect((), node.runtime) for _ in range(4)))
        assert sum(len(each) for each in found) >= 40
        assert _layers(node) == []


async def test_a_name_is_kept_for_the_last_who_needs_it(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as node:
        with node.catalog.new_layer("x" * 20) as path:
            path.write_bytes(b'{"parent": null, "files": [], "paths": []}')
            with node.catalog.new_layer(path.name):
                pass
            await node.catalog.collect((), node.runtime)
            assert path.exists()
        await node.catalog.collect((), node.runtime)
        assert not path.exists()


async def test_memory_stays_on_its_node(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs, keeps_memory=True) as node:
        made = await node.copying.snapshot(await start(node))
        with pytest.raises(Unsupported, match="has memory, which stays on its node"):
            await remote_of(node).push(made)
        with pytest.raises(Unsupported, match="has memory, which stays on its node"):
            remote_of(node).push_soon(made)
        assert await remote_of(node).list("t") == []


async def test_a_disk_of_many_files_stays_on_its_node(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    """A microVM that was started with the files of a snapshot with memory stands on images that lie beside a layer."""
    async with open_node("a", blobs) as node:
        made = await node.copying.snapshot(await start(node))
        layer = made.build.rootfs.layers[0]
        layer.with_name(f"{layer.name}.disk0").touch()
        with pytest.raises(Unsupported, match=f"stands on {layer.name}, the disk of a snapshot with memory"):
            await remote_of(node).push(made)
        assert await remote_of(node).list("t") == []
