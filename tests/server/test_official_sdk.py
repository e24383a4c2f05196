"""The official SDK drives every feature over real containers, with the checks that `make compat` runs alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
from e2b import AsyncSandbox, FilesystemEvent, SandboxState

from sandyard.server.embedded import EmbeddedServer
from tests.compat.sdk import CHECKS
from tests.yard import leftovers, node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def environment() -> Iterator[Mapping[str, str]]:
    with node_home() as home:
        with EmbeddedServer(node_settings(home, low=1, high=8)) as server:
            yield server.environment()
        assert leftovers(home) == []


@pytest.fixture(autouse=True)
def leads_to_the_server(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sdk(check: Callable[[], None]) -> None:
    check()


async def test_one_key_makes_one_sandbox() -> None:
    key = "one-and-the-same-key"
    first, second = await asyncio.gather(*(AsyncSandbox.create("base", idempotency_key=key) for _ in range(2)))
    assert first.sandbox_id == second.sandbox_id
    await first.kill()


async def test_streams_and_callbacks_of_the_async_client() -> None:
    box = await AsyncSandbox.create("base", timeout=120)
    try:
        lines: list[str] = []
        command = await box.commands.run("for i in 1 2 3; do echo $i; sleep 0.05; done", on_stdout=lines.append)
        assert (command.stdout, "".join(lines)) == ("1\n2\n3\n", "1\n2\n3\n")
        events: asyncio.Queue[FilesystemEvent] = asyncio.Queue()
        await box.files.make_dir("/tmp/watched")
        watch = await box.files.watch_dir("/tmp/watched", on_event=events.put)
        await box.files.write("/tmp/watched/new", "1")
        assert (await asyncio.wait_for(events.get(), 10)).name == "new"
        await watch.stop()  # type: ignore[no-untyped-call]
    finally:
        await box.kill()


async def test_a_command_goes_on_after_pause_and_resume() -> None:
    box = await AsyncSandbox.create("base", timeout=120)
    try:
        handle = await box.commands.run("read line && echo got $line", background=True, stdin=True)
        await box.pause()
        assert (await box.get_info()).state is SandboxState.PAUSED
        await box.connect(timeout=120)
        again = await box.commands.connect(handle.pid)
        await box.commands.send_stdin(handle.pid, "word\n")
        assert "got word" in (await again.wait()).stdout
    finally:
        await box.kill()


async def test_forks_side_by_side() -> None:
    box = await AsyncSandbox.create("base", timeout=120)
    children: list[AsyncSandbox] = []
    try:
        await box.files.write("/home/user/number", "0")
        found = await box.fork(count=4, timeout=60)
        children = [child for child in found if isinstance(child, AsyncSandbox)]
        assert len(children) == 4
        runs = (child.commands.run(f"echo {n} > number && cat number") for n, child in enumerate(children))
        assert [result.stdout for result in await asyncio.gather(*runs)] == [f"{n}\n" for n in range(4)]
        assert await box.files.read("/home/user/number") == "0"
    finally:
        await asyncio.gather(box.kill(), *(child.kill() for child in children))
