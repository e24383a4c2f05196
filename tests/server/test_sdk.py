"""The unmodified E2B SDK against a server over the in-memory runtime."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest
from e2b import (
    AsyncSandbox,
    CommandExitException,
    FilesystemEventType,
    NotFoundException,
    Sandbox,
    TimeoutException,
)

from sandyard.errors import DeathReason
from sandyard.runtimes.base import Instance

if TYPE_CHECKING:
    from tests.server.conftest import LiveServer


@pytest.fixture(autouse=True)
def sdk_environment(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def box() -> Sandbox:
    return Sandbox.create("base", timeout=60, envs={"FOO": "bar"})


def test_commands(box: Sandbox) -> None:
    result = box.commands.run("echo hi")
    assert (result.stdout, result.stderr, result.exit_code) == ("hi\n", "", 0)
    with pytest.raises(CommandExitException) as caught:
        box.commands.run("fail 7")
    assert (caught.value.exit_code, caught.value.stdout, caught.value.stderr) == (7, "part\n", "wrong\n")


def test_output_larger_than_every_buffer_arrives_whole(box: Sandbox) -> None:
    assert box.commands.run("flood 200000").stdout == "é漢😀" * 200_000


def test_the_environment_of_a_command(box: Sandbox) -> None:
    found = dict(line.split("=", 1) for line in box.commands.run("env", envs={"X": "1"}).stdout.splitlines())
    assert (found["FOO"], found["X"], found["USER"]) == ("bar", "1", "user")
    assert (found["E2B_SANDBOX"], found["E2B_SANDBOX_ID"]) == ("true", box.sandbox_id)
    assert found["E2B_TEMPLATE_ID"] == "base"
    as_root = box.commands.run("env", user="root", cwd="/tmp", envs={"FOO": "baz"})
    assert "HOME=/root" in as_root.stdout
    assert "FOO=baz" in as_root.stdout
    assert as_root.stderr == "/tmp"


def test_unknown_user_and_missing_cwd_are_told_apart(box: Sandbox) -> None:
    with pytest.raises(Exception, match="invalid username: 'nobody-here'"):
        box.commands.run("true", user="nobody-here")
    with pytest.raises(Exception, match="/none"):
        box.commands.run("true", cwd="/none")


def test_stdin_list_kill_and_connect(box: Sandbox) -> None:
    handle = box.commands.run("cat", background=True, stdin=True)
    box.commands.send_stdin(handle.pid, "hello")
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello"
    sleeper = box.commands.run("sleep 300", background=True)
    assert [p.pid for p in box.commands.list()] == [sleeper.pid]
    other = box.commands.connect(sleeper.pid)
    assert other.pid == sleeper.pid
    assert sleeper.kill()
    assert box.commands.list() == []
    with pytest.raises(CommandExitException):
        other.wait()
    assert box.commands.kill(99_999) is False
    with pytest.raises(NotFoundException):
        box.commands.send_stdin(99_999, "x")


def test_an_ended_command_can_still_be_connected_to(box: Sandbox) -> None:
    handle = box.commands.run("fail 3", background=True)
    with pytest.raises(CommandExitException):
        handle.wait()
    with pytest.raises(CommandExitException) as caught:
        box.commands.connect(handle.pid).wait()
    assert caught.value.exit_code == 3


def test_a_command_s_deadline_kills_it(box: Sandbox, server: LiveServer) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutException):
        box.commands.run("sleep 300", timeout=1)
    assert time.monotonic() - started < 5
    deadline = time.monotonic() + 3
    while server.call(server.agents[-1].processes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_disconnect_does_not_kill(box: Sandbox) -> None:
    handle = box.commands.run("sleep 300", background=True)
    handle.disconnect()
    time.sleep(0.2)
    assert [p.pid for p in box.commands.list()] == [handle.pid]


def test_files(box: Sandbox) -> None:
    data = bytes(range(256)) * 1024
    box.files.write("/tmp/deep/er/blob", data)
    assert bytes(box.files.read("/tmp/deep/er/blob", format="bytes")) == data
    assert b"".join(box.files.read("/tmp/deep/er/blob", format="stream")) == data
    assert bytes(box.files.read("/tmp/deep/er/blob", format="bytes", gzip=True)) == data
    box.files.write("rel", "héllo")
    assert box.files.read("/home/user/rel") == "héllo"
    written = box.files.write_files([{"path": "/tmp/m/1", "data": "one"}, {"path": "/tmp/m/2", "data": b""}])
    assert [w.path for w in written] == ["/tmp/m/1", "/tmp/m/2"]
    assert box.files.read("/tmp/m/2") == ""
    box.files.write("/tmp/zipped", data, gzip=True)
    assert bytes(box.files.read("/tmp/zipped", format="bytes")) == data
    assert [e.name for e in box.files.list("/tmp/m")] == ["1", "2"]
    assert box.files.get_info("/tmp/m/1").size == 3
    box.files.rename("/tmp/m/1", "/tmp/m/3")
    assert not box.files.exists("/tmp/m/1")
    assert box.files.make_dir("/tmp/d") is True
    assert box.files.make_dir("/tmp/d") is False
    box.files.remove("/tmp/m")
    with pytest.raises(NotFoundException):
        box.files.read("/tmp/m/3")
    with pytest.raises(NotFoundException):
        box.files.list("/tmp/m")
    with pytest.raises(Exception, match="is a directory"):
        box.files.read("/tmp/d")
    with pytest.raises(Exception, match="not a directory"):
        box.files.list("/tmp/zipped")


def test_a_polled_watch_sees_a_write(box: Sandbox) -> None:
    box.files.make_dir("/tmp/watched")
    watcher = box.files.watch_dir("/tmp/watched")
    box.files.write("/tmp/watched/x", "1")
    kinds = [event.type for event in watcher.get_new_events() if event.name == "x"]
    assert kinds[0] is FilesystemEventType.CREATE
    assert FilesystemEventType.WRITE in kinds
    assert watcher.get_new_events() == []
    watcher.stop()
    with pytest.raises(NotFoundException):
        box.files.watch_dir("/tmp/none")


async def test_a_streamed_watch_sees_a_write(server: LiveServer) -> None:
    box = await AsyncSandbox.create("base", timeout=60)
    await box.files.make_dir("/tmp/watched")
    seen = asyncio.Event()
    names: list[str] = []

    def on_event(event: object) -> None:
        names.append(event.name)  # type: ignore[attr-defined]
        seen.set()

    watch = await box.files.watch_dir("/tmp/watched", on_event=on_event)
    await box.files.write("/tmp/watched/y", "1")
    await asyncio.wait_for(seen.wait(), 5)
    assert names[0] == "y"
    await watch.stop()  # type: ignore[no-untyped-call]
    with pytest.raises(NotFoundException):
        await box.files.watch_dir("/tmp/none", on_event=on_event)


def test_life_and_death(box: Sandbox) -> None:
    assert box.is_running()
    again = Sandbox.connect(box.sandbox_id)
    assert again.commands.run("echo 1").stdout == "1\n"
    assert again.get_info().metadata == {}
    assert box.kill() is True
    assert box.kill() is False
    assert not box.is_running()
    with pytest.raises(NotFoundException):
        Sandbox.connect(box.sandbox_id)


def test_a_sandbox_killed_under_a_stream_breaks_it_off(box: Sandbox) -> None:
    handle = box.commands.run("sleep 300", background=True, timeout=0)
    threading.Timer(0.3, box.kill).start()
    started = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the SDK's affair, so long as it is not an exit
        handle.wait()
    assert not isinstance(caught.value, CommandExitException)
    assert time.monotonic() - started < 10
    assert not box.is_running()


def test_a_broken_link_is_made_anew_and_the_sandbox_lives_on(
    box: Sandbox, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = server.agents[-1]

    async def adopt(sandbox_id: str) -> Instance | None:
        agent.closed = False
        return server.runtime.instances[sandbox_id]

    monkeypatch.setattr(server.runtime, "adopt", adopt)
    agent.closed = True
    with pytest.raises(Exception, match="link to the agent"):
        box.commands.list()
    assert box.commands.run("echo again").stdout == "again\n"


def test_a_sandbox_whose_agent_never_answers_again_is_dead(
    box: Sandbox, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def adopt(_sandbox_id: str) -> Instance | None:
        return None

    monkeypatch.setattr(server.runtime, "adopt", adopt)
    server.agents[-1].closed = True
    with pytest.raises(Exception, match="not found"):
        box.commands.run("echo 1")
    assert not box.is_running()


def test_a_sandbox_that_crashes_under_a_command_does_not_look_like_an_exit(box: Sandbox, server: LiveServer) -> None:
    handle = box.commands.run("sleep 300", background=True, timeout=0)
    server.call(server.runtime.instances[box.sandbox_id].die(DeathReason.OOM))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - as above
        handle.wait()
    assert not isinstance(caught.value, CommandExitException)
    assert not box.is_running()
