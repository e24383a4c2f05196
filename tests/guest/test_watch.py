from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest import LinkAgent, ProcessSpec, Watch, WatchEvent, WatchEventType
from tests.guest.conftest import RunningAgent, collect, eventually

CREATE, WRITE, REMOVE = WatchEventType.CREATE, WatchEventType.WRITE, WatchEventType.REMOVE
RENAME, CHMOD = WatchEventType.RENAME, WatchEventType.CHMOD


def pairs(events: Sequence[WatchEvent]) -> list[tuple[str, str]]:
    return [(str(event.type), event.name) for event in events]


async def settled(agent: LinkAgent, watch: Watch) -> list[tuple[str, str]]:
    """All events so far; the answer to a hello comes after them."""
    await agent.hello()
    return pairs(watch.pending())


async def test_one_small_write_is_three_events_there_when_it_returns(agent: LinkAgent, tmp_path: Path) -> None:
    watch = await agent.watch(str(tmp_path))
    await agent.write_file(f"{tmp_path}/f", b"x" * 65_536, user="0:0")
    assert pairs(watch.pending()) == [("create", "f"), ("chmod", "f"), ("write", "f")]
    await agent.write_file(f"{tmp_path}/f", b"y")
    assert set(pairs(watch.pending())) == {("write", "f")}


async def test_events_of_a_command_come_before_its_end(agent: LinkAgent, tmp_path: Path) -> None:
    watch = await agent.watch(str(tmp_path))
    process = await agent.spawn(
        ProcessSpec(["sh", "-c", "mkdir d; echo x > f; chmod 600 f; mv f g; rm g"], cwd=str(tmp_path))
    )
    await process.wait()
    assert pairs(watch.pending()) == [
        ("create", "d"), ("create", "f"), ("write", "f"), ("chmod", "f"), ("rename", "f"), ("create", "g"),
        ("remove", "g"),
    ]  # fmt: skip
    (tmp_path / "d/inner").touch()
    assert await settled(agent, watch) == []
    await collect(process)


async def test_recursive(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "old/deep").mkdir(parents=True)
    watch = await agent.watch(str(tmp_path), recursive=True)
    (tmp_path / "old/deep/f").touch()
    assert ("create", "old/deep/f") in await settled(agent, watch)
    (tmp_path / "new/a/b").mkdir(parents=True)
    (tmp_path / "new/a/b/f").touch()
    assert {("create", "new"), ("create", "new/a"), ("create", "new/a/b"), ("create", "new/a/b/f")} <= set(
        await settled(agent, watch)
    )
    (tmp_path / "new/a/b/g").touch()
    assert ("create", "new/a/b/g") in await settled(agent, watch)
    (tmp_path / "new").rename(tmp_path / "named")
    await settled(agent, watch)
    (tmp_path / "named/a/b/h").touch()
    events = await settled(agent, watch)
    assert ("create", "named/a/b/h") in events
    assert not any(name.startswith("new") for _, name in events)
    shutil.rmtree(tmp_path / "named")
    events = await settled(agent, watch)
    assert {("remove", "named"), ("remove", "named/a/b/h")} <= set(events)


async def test_waiting_for_events_and_the_end(agent: LinkAgent, running: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    before = running.descriptors()
    watch = await agent.watch(f"{tmp_path}/d")
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    (tmp_path / "d/f").touch()
    assert (await waiting).name == "f"
    shutil.rmtree(tmp_path / "d")
    rest = [event async for event in watch]
    assert pairs(rest)[-1] == ("remove", "")
    await eventually(lambda: running.descriptors() == before)
    await watch.close()


async def test_close_stops(agent: LinkAgent, running: RunningAgent, tmp_path: Path) -> None:
    before = running.descriptors()
    watch = await agent.watch(str(tmp_path), recursive=True)
    await watch.close()
    await watch.close()
    await agent.hello()
    assert running.descriptors() == before
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_flood_overflows_and_says_so(agent: LinkAgent, tmp_path: Path) -> None:
    watch = await agent.watch(str(tmp_path))
    script = "i=0; while [ $i -lt 8000 ]; do : > long-name-of-a-file-$i; i=$((i+1)); done"
    process = await agent.spawn(ProcessSpec(["sh", "-c", script], cwd=str(tmp_path)))
    await process.wait()
    seen = 0
    overflow = False
    while events := watch.pending():
        seen += len(events)
        overflow |= any(event.type == WatchEventType.OVERFLOW for event in events)
        await agent.hello()
    assert overflow or seen == 16_000 or seen == 8000
    (tmp_path / "after").touch()
    assert ("create", "after") in await settled(agent, watch)


async def test_what_cannot_be_watched(agent: LinkAgent, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for path, code in ((f"{tmp_path}/f", GuestErrorCode.NOT_DIRECTORY), (f"{tmp_path}/x", GuestErrorCode.NOT_FOUND)):
        with pytest.raises(GuestError) as caught:
            await agent.watch(path)
        assert caught.value.code == code


async def test_a_watch_whose_link_is_gone_is_not_silent(running: RunningAgent, tmp_path: Path) -> None:
    agent = await running.connect()
    watch = await agent.watch(str(tmp_path))
    (tmp_path / "f").touch()
    await agent.hello()
    await agent.close()
    assert {event.name for event in watch.pending()} == {"f"}
    with pytest.raises(AgentLinkError):
        watch.pending()
