"""Garbage in the storage: what goes, what stays, and who is in whose way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sandyard.errors import Conflict
from sandyard.sandboxes.remote import intents
from sandyard.sandboxes.remote.intents import FRESH_SECONDS, sweeping, uploading
from sandyard.sandboxes.remote.sweeping import sweep, verify
from sandyard.store.blobs import BlobDamaged
from sandyard.store.blobs.local import LocalBlobs
from sandyard.store.blobs.memory import MemoryBlobs
from tests.sandboxes.remote.conftest import read, remote_of, start

if TYPE_CHECKING:
    from tests.sandboxes.remote.conftest import OpenNode


def _age(blobs: MemoryBlobs, seconds: float) -> None:
    for key, (data, at) in blobs.objects.items():
        blobs.objects[key] = (data, at - seconds)


async def test_what_no_snapshot_needs_goes_and_the_rest_starts(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        made = []
        for number in range(3):
            await source.agent.write_file(f"/noise{number}", os.urandom(200_000))
            made.append(await a.copying.snapshot(source))
            await remote_of(a).push(made[-1])
        other = await start(a, tenant="other")
        await other.agent.write_file("/noise", os.urandom(200_000))
        await remote_of(a).push(await a.copying.snapshot(other))
        await remote_of(a).remove("t", made[0].id)
        await remote_of(a).remove("t", made[2].id)
        before = dict(blobs.objects)
        trial = await sweep(blobs, 0, dry_run=True)
        assert blobs.objects == before
        assert trial.removed == 0
        assert trial.snapshots == 2
        assert 200_000 < trial.garbage_bytes < 300_000
        done = await sweep(blobs, 0)
        assert (done.removed, done.removed_bytes) == (trial.garbage, trial.garbage_bytes)
        assert before.keys() - blobs.objects.keys()
        assert (await verify(blobs, deep=True)).problems == []
        box = await start(b, made[1].id)  # it is the difference to the one that was removed
        assert await read(box, "/noise0") == await read(source, "/noise0")
        assert (await sweep(blobs, 0)).garbage == 0
        await remote_of(a).push(made[2])  # what it counted on was swept, and is sent again
        assert await read(await start(b, made[2].id), "/noise2") == await read(source, "/noise2")


async def test_young_garbage_stays(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a:
        made = await a.copying.snapshot(await start(a))
        await remote_of(a).push(made)
        await remote_of(a).remove("t", made.id)
        found = await sweep(blobs, 3600)
        assert found.garbage == 0
        assert found.young > 0
        _age(blobs, 3700)
        assert (await sweep(blobs, 3600)).removed == found.young
        assert blobs.objects == {}


async def test_uploads_and_sweeps_keep_apart(blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "_WAIT_SECONDS", 0.01)
    async with uploading(blobs):
        with pytest.raises(Conflict, match="being uploaded"):
            await sweep(blobs, 0)
        async with uploading(blobs):
            pass
    begun, order = asyncio.Event(), []

    async def send() -> None:
        async with uploading(blobs):
            order.append("upload")

    async with sweeping(blobs):
        task = asyncio.create_task(send())
        begun.set()
        await asyncio.sleep(0.1)
        order.append("sweep")
    await task
    assert order == ["sweep", "upload"]
    assert blobs.objects == {}
    async with sweeping(blobs):
        with pytest.raises(Conflict, match="garbage is being removed"):
            async with uploading(blobs, patience=0.05):
                raise AssertionError("it was let in")
    assert blobs.objects == {}


async def test_killed_ones_are_forgotten(blobs: MemoryBlobs) -> None:
    blobs.objects["uploads/x"] = (b"", time.time() - FRESH_SECONDS - 5)
    blobs.objects["sweeps/x"] = (b"", time.time() - FRESH_SECONDS - 5)
    async with uploading(blobs):
        assert "sweeps/x" not in blobs.objects
    await sweep(blobs, 0)
    assert blobs.objects == {}


async def test_an_upload_says_that_it_lives(blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intents, "RENEW_SECONDS", 0.02)
    async with uploading(blobs):
        (key,) = blobs.objects
        blobs.objects[key] = (b"", 0.0)
        await asyncio.sleep(0.2)
        assert blobs.objects[key][1] > 0


async def test_nothing_goes_where_something_cannot_be_read(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a:
        for _ in range(2):
            await remote_of(a).push(await a.copying.snapshot(await start(a)))
        blobs.objects["chunks/ab/" + "ab" * 32] = (b"garbage", 0.0)
        key = next(key for key in blobs.objects if key.startswith("snapshots/"))
        blobs.objects[key] = (blobs.objects[key][0][:-3], 0.0)
        before = blobs.objects.keys() - set()
        with pytest.raises(BlobDamaged):
            await sweep(blobs, 0)
        assert blobs.objects.keys() == before


async def test_verify_names_what_is_damaged_or_gone(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(300_000))
        await remote_of(a).push(await a.copying.snapshot(source))
        assert (await verify(blobs)).problems == []
        first, second, *_ = sorted(key for key in blobs.objects if key.startswith("chunks/"))
        blobs.objects[first] = (blobs.objects[first][0][:-1] + b"!", 0.0)
        del blobs.objects[second]
        assert len((await verify(blobs)).problems) == 1
        problems = (await verify(blobs, deep=True)).problems
        assert {first[-64:] in " ".join(problems), second[-64:] in " ".join(problems)} == {True}


@pytest.mark.parametrize("damage", ["gone", "empty", "manifest"])
async def test_a_push_sends_again_what_the_storage_lost(open_node: OpenNode, blobs: MemoryBlobs, damage: str) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(300_000))
        made = await a.copying.snapshot(source)
        await remote_of(a).push(made)
        whole = {key: data for key, (data, _) in blobs.objects.items()}
        lost = sorted(key for key in whole if key.startswith("layers/" if damage == "manifest" else "chunks/"))[0]
        if damage == "gone":
            del blobs.objects[lost]
        else:
            blobs.objects[lost] = (b"" if damage == "empty" else whole[lost][:-1], 0.0)
        await remote_of(a).push(made)
        assert {key: data for key, (data, _) in blobs.objects.items()} == whole
        assert await read(await start(b, made.id), "/noise") == await read(source, "/noise")


async def test_what_is_damaged_is_removed_and_sent_again(open_node: OpenNode, blobs: MemoryBlobs) -> None:
    async with open_node("a", blobs) as a, open_node("b", blobs) as b:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(300_000))
        made = await a.copying.snapshot(source)
        await remote_of(a).push(made)
        bad = sorted(key for key in blobs.objects if key.startswith("chunks/"))[1]
        blobs.objects[bad] = (blobs.objects[bad][0][:-7], 0.0)
        async with uploading(blobs):
            with pytest.raises(Conflict):  # somebody may count on it right now
                await verify(blobs, repair=True)
        found = await verify(blobs, repair=True)
        assert (found.removed, len(found.problems)) == (1, 1)
        assert bad not in blobs.objects
        assert (await verify(blobs, repair=True)).removed == 0
        await remote_of(a).push(made)
        assert (await verify(blobs, deep=True)).problems == []
        assert await read(await start(b, made.id), "/noise") == await read(source, "/noise")


async def test_the_command_sweeps_and_verifies(open_node: OpenNode, tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "storage")
    async with open_node("a", blobs) as a:
        source = await start(a)
        await source.agent.write_file("/noise", os.urandom(300_000))
        kept, gone = [await a.copying.snapshot(source) for _ in range(2)]
        for each in (kept, gone):
            await remote_of(a).push(each)
        await source.agent.write_file("/more", os.urandom(300_000))
        third = await a.copying.snapshot(source)
        await remote_of(a).push(third)
        for each in (gone, third):
            await remote_of(a).remove("t", each.id)
    before = [info async for info in blobs.list("")]
    status, told = await _sweep(blobs, "--dry-run", grace=0)
    assert status == 0
    assert "would remove" in told
    assert [info async for info in blobs.list("")] == before
    status, told = await _sweep(blobs, grace=24)
    assert "removed 0 objects" in told
    assert "younger than blobs.grace_hours stay" in told
    status, told = await _sweep(blobs, "--verify", grace=0)
    assert status == 0, told
    assert "1 snapshots keep" in told
    assert "are what they should be" in told
    assert len([info async for info in blobs.list("")]) < len(before)
    (chunk, *_) = [info.key async for info in blobs.list("chunks")]
    await blobs.put(chunk, b"\0damaged")
    status, told = await _sweep(blobs, "--verify", grace=0)
    assert status != 0
    assert chunk[-64:] in told
    status, told = await _sweep(blobs, "--repair", grace=0)
    assert status != 0
    assert "1 chunks were removed" in told
    assert await blobs.head(chunk) is None


async def _sweep(blobs: LocalBlobs, *words: str, grace: float) -> tuple[int, str]:
    """The exit status of the command, and what it said."""
    environment = {
        **os.environ,
        "SANDYARD_BLOBS__URL": f"file://{blobs.name}",
        "SANDYARD_BLOBS__GRACE_HOURS": str(grace),
    }
    command = [sys.executable, "-m", "sandyard", "snapshot", "sweep", *words]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    return done.returncode, done.stdout + done.stderr
