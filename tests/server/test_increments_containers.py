"""Snapshots of one sandbox, one after another, through the SDK over real containers."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox, SandboxException

from sandyard.config import Settings
from sandyard.server.embedded import EmbeddedServer
from tests.server.test_pausing_containers import point_sdk_at

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("clean")]


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(settings) as running:
        point_sdk_at(running, monkeypatch)
        yield running


def _layers(settings: Settings) -> Path:
    return settings.paths.state / "layers"


def _taken(settings: Settings) -> int:
    return sum(path.stat().st_blocks * 512 for path in _layers(settings).iterdir())


def _state(box: Sandbox) -> str:
    return str(box.commands.run("cat n; md5sum big").stdout)


def test_each_costs_what_changed_and_outlives_the_ones_before(settings: Settings, server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=200)
    box.commands.run("head -c 67108864 /dev/urandom > big; echo 0 > n; sync")
    made, states, sizes, before = [], [], [], 0
    for number in range(4):
        if number:
            box.commands.run(f"head -c 1048576 /dev/urandom > new{number}; echo {number} > n")
        made.append(box.create_snapshot().snapshot_id)
        states.append(_state(box))
        sizes.append(_taken(settings) - before)
        before += sizes[-1]
    assert sizes[0] > 64 << 20
    assert all(1 << 20 < size < 3 << 20 for size in sizes[1:]), sizes
    box.kill()
    for snapshot in made[:3]:
        Sandbox.delete_snapshot(snapshot)
    time.sleep(1.5)  # the collection comes a moment later
    copies = [Sandbox.create(made[3], timeout=60) for _ in range(2)]
    assert [_state(copy) for copy in copies] == [states[3]] * 2
    again = copies[0].create_snapshot().snapshot_id  # of another disk: it begins a chain of its own
    for copy in copies:
        copy.kill()
    Sandbox.delete_snapshot(made[3])
    third = Sandbox.create(again, timeout=60)
    assert _state(third) == states[3]
    third.kill()
    Sandbox.delete_snapshot(again)
    deadline = time.monotonic() + 20
    while list(_layers(settings).iterdir()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert list(_layers(settings).iterdir()) == []


def test_a_pause_without_memory_goes_on_with_the_chain(settings: Settings, server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=200)
    box.commands.run("head -c 33554432 /dev/urandom > big; echo 0 > n; sync")
    box.create_snapshot()
    before = _taken(settings)
    box.commands.run("echo 1 > n")
    box.pause(mode="filesystem")
    halted = Sandbox.create_snapshot(box.sandbox_id)
    assert _taken(settings) - before < 2 << 20
    copy = Sandbox.create(halted.snapshot_id, timeout=60)
    assert copy.commands.run("cat n").stdout == "1\n"
    copy.kill()
    box.kill()


def test_a_damaged_snapshot_is_refused_with_the_reason(settings: Settings, server: EmbeddedServer) -> None:
    box = Sandbox.create("base", timeout=200)
    box.commands.run("head -c 8388608 /dev/urandom > big; echo 0 > n; sync")
    first = box.create_snapshot().snapshot_id
    box.commands.run("echo 1 > n")
    second = box.create_snapshot().snapshot_id
    (delta,) = _layers(settings).glob("*.delta")
    content = bytearray(delta.read_bytes())
    content[100] ^= 1
    delta.chmod(0o600)
    delta.write_bytes(content)
    with pytest.raises(Exception, match="not what was written"):
        Sandbox.create(second, timeout=60)
    fine = Sandbox.create(first, timeout=60)
    assert fine.commands.run("cat n").stdout == "0\n"
    fine.kill()
    box.kill()


def test_a_rotation_takes_bounded_room(settings: Settings, server: EmbeddedServer) -> None:
    """Each snapshot replaces the one before: what those were needed for is merged, in the background."""
    box = Sandbox.create("base", timeout=200)
    box.commands.run("head -c 33554432 /dev/urandom > big; echo 0 > n; sync")
    last = box.create_snapshot().snapshot_id
    whole = _taken(settings)
    for number in range(1, 7):
        box.commands.run(f"head -c 4194304 /dev/urandom | dd of=big conv=notrunc status=none; echo {number} > n")
        made = box.create_snapshot().snapshot_id
        Sandbox.delete_snapshot(last)
        last = made
    state = _state(box)
    box.kill()
    _wait(lambda: _taken(settings) < whole + (6 << 20), 30, lambda: _shown(settings))
    copy = Sandbox.create(last, timeout=60)
    assert _state(copy) == state
    copy.kill()


def _shown(settings: Settings) -> str:
    return ", ".join(f"{p.name} {p.stat().st_blocks // 2048} MiB" for p in _layers(settings).iterdir())


def _wait(true: Callable[[], bool], seconds: float, why: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


class Rotation:
    """Snapshots, copies and deletions until the server is gone; `states` holds what must be there then."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.number = 0

    def run(self, box_id: str) -> None:
        try:
            box = Sandbox.connect(box_id, timeout=600)
            while True:
                self.number += 1
                at = self.number % 5
                box.commands.run(
                    f"head -c 1048576 /dev/urandom | dd of=big conv=notrunc bs=1M seek={at} status=none;"
                    f" echo {self.number} > n"
                )
                made = box.create_snapshot().snapshot_id
                self.states[made] = f"{self.number}\n"
                Sandbox.create(made, timeout=20)
                if len(self.states) > 2:
                    going = next(iter(self.states))
                    del self.states[going]  # whether it is gone is not known until there is an answer
                    Sandbox.delete_snapshot(going)
        except (SandboxException, httpx.HTTPError, OSError):
            return


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_amid_snapshots_has_the_old_or_the_new(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    kept = settings.model_copy(update={"server": settings.server.model_copy(update={"keep_sandboxes": True})})
    rng, rotation = random.Random(11), Rotation()
    with EmbeddedServer(kept) as server:
        point_sdk_at(server, monkeypatch)
        box = Sandbox.create("base", timeout=600)
        box.commands.run("head -c 16777216 /dev/urandom > big")
    for attempt in range(times):
        with EmbeddedServer(kept) as server:
            point_sdk_at(server, monkeypatch)
            if rotation.states:
                wanted = next(reversed(rotation.states))
                copy = Sandbox.create(wanted, timeout=30)
                assert copy.commands.run("cat n").stdout == rotation.states[wanted], attempt
                copy.kill()
            worker = threading.Thread(target=rotation.run, args=(box.sandbox_id,), daemon=True)
            worker.start()
            time.sleep(0.2 + rng.random() * 3)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            worker.join(60)
    assert rotation.number > times // 2
    with EmbeddedServer(settings) as server:
        point_sdk_at(server, monkeypatch)
        for snapshot, state in rotation.states.items():
            copy = Sandbox.create(snapshot, timeout=60)
            assert copy.commands.run("cat n").stdout == state
        for each in Sandbox.list().next_items():
            Sandbox.kill(each.sandbox_id)
        for snapshot in [each.snapshot_id for each in Sandbox.list_snapshots().next_items()]:
            Sandbox.delete_snapshot(snapshot)
        _wait(lambda: not list(_layers(settings).iterdir()), 30, lambda: _shown(settings))
