# ruff: noqa: ASYNC220, ASYNC240 - the test and the agent share one machine; nothing else waits
"""The link goes and comes; processes stay."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest import Channel, ExitStatus, LinkAgent, ProcessSpec, PtySize, Watch, open_agent
from tests.guest.conftest import RunningAgent, closing, collect, eventually, needs_root


async def test_processes_live_on_and_are_taken_over(running: RunningAgent) -> None:
    first = await running.connect()
    spec = ProcessSpec(["cat"], env={"A": "ü\udcff"}, cwd="/", stdin=True)
    pid = (await first.spawn(spec)).pid
    await first.close()
    second = await running.connect()
    assert await second.processes() == [pid]
    process = await second.attach(pid)
    assert process.spec == spec
    await process.write_stdin(b"still here")
    await process.close_stdin()
    assert await collect(process) == {Channel.STDOUT: b"still here"}
    assert await process.wait() == ExitStatus(code=0)
    await second.close()


async def test_output_without_a_link_is_dropped_and_never_blocks(running: RunningAgent, tmp_path: Path) -> None:
    first = await running.connect()
    script = f"sleep 0.2; head -c 3000000 /dev/zero; touch {tmp_path}/done; read x; echo after"
    process = await first.spawn(ProcessSpec(["sh", "-c", script], stdin=True))
    await first.close()
    await eventually((tmp_path / "done").exists)
    second = await running.connect()
    assert int((await second.hello())["dropped_bytes"]) == 3_000_000
    again = await second.attach(process.pid)
    await again.write_stdin(b"\n")
    assert await collect(again) == {Channel.STDOUT: b"after\n"}
    await second.close()


async def test_an_exit_nobody_saw_is_kept(running: RunningAgent) -> None:
    first = await running.connect()
    process = await first.spawn(ProcessSpec(["sh", "-c", "sleep 0.2; exit 9"]))
    await first.close()
    await asyncio.sleep(0.5)
    second = await running.connect()
    assert await second.processes() == []
    again = await second.attach(process.pid)
    assert await again.wait() == ExitStatus(code=9)
    assert await collect(again) == {}
    with pytest.raises(GuestError) as caught:
        await second.attach(process.pid)
    assert caught.value.code == GuestErrorCode.NOT_FOUND
    await second.close()


async def test_exits_nobody_asks_for_are_not_kept_without_limit(running: RunningAgent) -> None:
    first = await running.connect()
    spec = ProcessSpec(["sh", "-c", "sleep 1"])
    await asyncio.gather(*(first.spawn(spec) for _ in range(100)))
    before = running.descriptors()
    await first.close()
    second = await running.connect()
    await asyncio.sleep(1.5)
    while (await second.hello())["processes"] != "0":  # noqa: ASYNC110 - bounded by the test's timeout
        await asyncio.sleep(0.05)
    # Each ended process had two pipes; those of the 64 that are remembered are closed as well.
    await eventually(lambda: running.descriptors() <= before - 200)
    await second.close()


async def test_attach_takes_over_from_an_earlier_attach(agent: LinkAgent) -> None:
    old = await agent.spawn(ProcessSpec(["cat"], pty=PtySize(24, 80)))
    new = await agent.attach(old.pid)
    assert new.spec.pty == PtySize(24, 80)
    with pytest.raises(AgentLinkError, match="taken over"):
        await old.wait()
    await new.write_stdin(b"x\n")
    assert (await anext(new.output()))[0] == Channel.PTY
    await new.signal(signal.SIGKILL)
    assert await new.wait() == ExitStatus(signal=signal.SIGKILL)


async def test_a_new_link_replaces_the_old_one(running: RunningAgent) -> None:
    first = await running.connect()
    process = await first.spawn(ProcessSpec(["sleep", "5"]))
    second = await running.connect()
    with pytest.raises(AgentLinkError, match="closed the link"):
        await process.wait()
    with pytest.raises(AgentLinkError):
        await first.hello()
    assert await second.processes() == [process.pid]
    await (await second.attach(process.pid)).signal(signal.SIGKILL)
    await first.close()
    await second.close()


async def test_everything_in_flight_fails_when_the_link_closes(running: RunningAgent, tmp_path: Path) -> None:
    agent = await running.connect()
    process = await agent.spawn(ProcessSpec(["sleep", "5"], stdin=True))
    watch = await agent.watch(str(tmp_path))
    waits = [
        asyncio.ensure_future(process.wait()),
        asyncio.ensure_future(collect(process)),
        asyncio.ensure_future(process.write_stdin(b"x" * 1_000_000)),
        asyncio.ensure_future(anext(watch)),
    ]
    await asyncio.sleep(0.1)
    await agent.close()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(result) for result in results] == [AgentLinkError] * 4
    await agent.close()
    second = await running.connect()
    await (await second.attach(process.pid)).signal(signal.SIGKILL)
    assert (await second.hello())["streams"] in ("0", "1")
    await second.close()


async def test_cancelled_calls_free_their_streams(agent: LinkAgent, running: RunningAgent, tmp_path: Path) -> None:
    before = running.descriptors()
    for i in range(30):
        tasks = [
            asyncio.ensure_future(agent.hello()),
            asyncio.ensure_future(agent.list_dir("/usr", depth=2)),
            asyncio.ensure_future(agent.write_file(f"{tmp_path}/{i}", b"x" * 100_000)),
            asyncio.ensure_future(agent.watch("/tmp")),
        ]
        await asyncio.sleep(0.001 * (i % 4))
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Watch):
                await result.close()
    await eventually(lambda: running.descriptors() == before)
    assert (await agent.hello())["streams"] == "0"


async def test_no_agent_there(tmp_path: Path) -> None:
    with pytest.raises(AgentLinkError, match="no agent answers"):
        await open_agent(tmp_path / "missing", 0.05)


async def test_a_path_longer_than_a_socket_address(running: RunningAgent, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    os.link(running.path, deep / "a.sock")
    agent = await open_agent(deep / "a.sock", 5)
    assert (await agent.hello())["version"]
    await agent.close()


@needs_root
async def test_as_the_first_process_of_a_pid_namespace(checked_binary: Path, tmp_path: Path) -> None:
    """Orphans are adopted and reaped, signals do not kill it, SIGTERM takes all with it."""
    import socket

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    command = [
        "unshare",
        "--kill-child",
        "--pid",
        "--mount",
        "--fork",
        "--mount-proc",
        str(checked_binary),
        "--listen-fd",
    ]
    environ = {"ASAN_OPTIONS": "detect_leaks=0:handle_segv=0", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [*command, checked_binary, "--listen-fd", str(listener.fileno())], pass_fds=[listener.fileno()], env=environ
    )
    listener.close()
    try:
        try:
            agent = await open_agent(tmp_path / "s", 5)
        except AgentLinkError:
            pytest.skip("no new pid namespace here")
        async with closing(agent):
            assert (await agent.hello())["pid"] == "1"
            script = "(setsid sleep 0.1 &); for s in SEGV PIPE HUP USR1 TERM KILL; do kill -$s 1; done; sleep 0.3"
            orphaned = await agent.spawn(ProcessSpec(["sh", "-c", script + "; ls -d /proc/[0-9]*"]))
            output = await collect(orphaned)
            assert len(output[Channel.STDOUT].split()) == 2  # the agent, and ls in the shell's place
            long = await agent.spawn(ProcessSpec(["sh", "-c", "setsid sleep 30 & sleep 30"]))
            inside = await agent.spawn(ProcessSpec(["kill", "-TERM", "1"]))
            await inside.wait()
            await agent.hello()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            with pytest.raises(AgentLinkError):
                await long.wait()
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
