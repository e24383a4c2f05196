"""Pause, snapshot, fork and start commands over real containers, as the SDK sees them; a server that is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2b import Sandbox, SandboxException, SandboxState
from e2b.sandbox.sandbox_api import SandboxQuery

from sandyard.config import Settings
from sandyard.server.embedded import EmbeddedServer
from tests.yard import node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("clean")]
BOOT_ID = "/proc/sys/kernel/random/boot_id"


@pytest.fixture
def settings() -> Iterator[Settings]:
    with node_home() as home:
        yield node_settings(home, low=0)


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(settings) as running:
        point_sdk_at(running, monkeypatch)
        yield running


def point_sdk_at(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_pause_keeps_a_running_command(server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=120)
    command = box.commands.run("read x; echo got $x", background=True, stdin=True)
    sleeper = box.commands.run("sleep 3600", background=True)
    boot_id = box.files.read(BOOT_ID)
    assert box.pause()
    assert not box.is_running()
    assert box.pause() is False
    listed = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert [each.sandbox_id for each in listed] == [box.sandbox_id]
    box.connect()
    assert box.files.read(BOOT_ID) == boot_id
    assert {sleeper.pid, command.pid} <= {process.pid for process in box.commands.list()}
    box.commands.send_stdin(command.pid, "it\n")
    assert command.wait().stdout == "got it\n"
    assert box.commands.connect(sleeper.pid).kill()
    box.kill()


def test_a_pause_of_files_and_an_auto_pause(server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=120, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    box.commands.run("echo kept > /home/user/file; nohup sleep 1000 >/dev/null 2>&1 &")
    boot_id = box.files.read(BOOT_ID)
    box.set_timeout(0)
    assert not box.is_running()
    info = box.get_info()
    assert info.state is SandboxState.PAUSED
    box.connect(timeout=60)
    assert box.files.read(BOOT_ID) != boot_id
    assert box.commands.run("cat file; pgrep -c sleep || true").stdout == "kept\n0\n"
    box.kill()


def test_copies_of_a_sandbox(server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=120)
    box.commands.run("echo 1 > one; rm -rf /opt; sudo rm /etc/os-release; ln -s one link; mkfifo pipe")
    first = box.create_snapshot(name="state")
    box.commands.run("echo 2 > one")
    (fork,) = box.fork(timeout=60)
    assert isinstance(fork, Sandbox)
    second = fork.create_snapshot()
    look = "cat link; ls /etc/os-release 2>/dev/null; test -p pipe && hostname"
    for start, wanted in ((first.snapshot_id, "1"), (second.snapshot_id, "2"), ("state", "1")):
        copy = Sandbox.create(start, timeout=60)
        assert copy.commands.run(look).stdout.split() == [wanted, copy.sandbox_id]
        assert copy.commands.run("sudo -n id -u").stdout == "0\n"
        copy.kill()
    assert box.commands.run("cat one").stdout == "2\n"
    assert Sandbox.delete_snapshot(first.snapshot_id)
    assert not Sandbox.delete_snapshot(first.snapshot_id)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("state")
    for each in (box, fork):
        each.kill()
    Sandbox.delete_snapshot(second.snapshot_id)


def test_a_fork_of_many(server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=120)
    box.files.write("/home/user/blob", os.urandom(8 << 20))
    digest = box.commands.run("sha256sum blob").stdout
    children = [child for child in box.fork(count=8, timeout=60) if isinstance(child, Sandbox)]
    assert len(children) == 8
    assert {child.commands.run("sha256sum blob").stdout for child in children} == {digest}
    ids = {child.files.read(BOOT_ID) for child in children} | {box.files.read(BOOT_ID)}
    assert len(ids) == 9
    for each in (*children, box):
        each.kill()


def test_what_is_paused_outlives_the_server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that keeps no sandboxes keeps the files of the paused ones."""
    with EmbeddedServer(settings) as server:
        point_sdk_at(server, monkeypatch)
        boxes = [Sandbox.create("base", timeout=60) for _ in range(3)]
        for number, box in enumerate(boxes):
            box.files.write("/home/user/file", str(number))
        assert boxes[0].pause()
        assert boxes[1].pause(mode="filesystem")
        Sandbox.fork(boxes[1].sandbox_id)
    with EmbeddedServer(settings) as server:
        point_sdk_at(server, monkeypatch)
        for number, box in enumerate(boxes[:2]):
            found = Sandbox.connect(box.sandbox_id, timeout=60)
            assert found.files.read("/home/user/file") == str(number)
            found.kill()
        assert Sandbox.list().next_items() == []


@pytest.mark.full
def test_a_server_that_is_killed_amid_moves(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment it dies at: no file is lost, nothing half is left, and each sandbox can be had again."""
    kept = settings.model_copy(update={"server": settings.server.model_copy(update={"keep_sandboxes": True})})
    with EmbeddedServer(kept) as server:
        point_sdk_at(server, monkeypatch)
        boxes = [Sandbox.create("base", timeout=600) for _ in range(3)]
        for number, box in enumerate(boxes):
            box.files.write("/home/user/file", str(number))
    for attempt in range(4):
        with EmbeddedServer(kept) as server:
            point_sdk_at(server, monkeypatch)
            found = [Sandbox.connect(box.sandbox_id, timeout=600) for box in boxes]
            for number, box in enumerate(found):
                assert box.files.read("/home/user/file") == str(number), (attempt, number)
            workers = [threading.Thread(target=churn, args=(box, n), daemon=True) for n, box in enumerate(found)]
            for worker in workers:
                worker.start()
            time.sleep(0.1 + random.random() * 0.6)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            for worker in workers:
                worker.join(60)
    with EmbeddedServer(settings) as server:
        point_sdk_at(server, monkeypatch)
        snapshots = Sandbox.list_snapshots().next_items()
        assert snapshots
        for snapshot in snapshots:
            copy = Sandbox.create(snapshot.snapshot_id, timeout=60)
            assert copy.files.read("/home/user/file") in ("0", "1", "2")
            copy.kill()
            assert Sandbox.delete_snapshot(snapshot.snapshot_id)
        for each in Sandbox.list().next_items():
            Sandbox.kill(each.sandbox_id)
        layers = settings.paths.state / "layers"
        wait_for(lambda: not list(layers.iterdir()))


def churn(box: Sandbox, number: int) -> None:
    """Moves until the server is gone."""
    moves: list[Callable[[], object]] = [
        lambda: box.pause(),
        lambda: box.connect(timeout=600),
        lambda: box.create_snapshot(),
        lambda: box.pause(mode="filesystem"),
        lambda: box.connect(timeout=600),
    ]
    try:
        while True:
            for move in moves[number % 2 :]:
                move()
    except (SandboxException, httpx.HTTPError, OSError):
        return
