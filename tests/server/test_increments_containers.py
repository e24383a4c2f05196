"""Snapshots of one sandbox, one after another, through the SDK over real containers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from sandyard.config import Settings
from sandyard.server.embedded import EmbeddedServer

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("clean")]


@pytest.fixture
def options(settings: Settings) -> Iterator[dict[str, str]]:
    with EmbeddedServer(settings) as server:
        found = server.environment()
        yield {
            "api_url": found["E2B_API_URL"],
            "api_key": found["E2B_API_KEY"],
            "sandbox_url": found.get("E2B_SANDBOX_URL", found["E2B_API_URL"]),
        }


def _layers(settings: Settings) -> Path:
    return settings.paths.state / "layers"


def _taken(settings: Settings) -> int:
    return sum(path.stat().st_blocks * 512 for path in _layers(settings).iterdir())


def _state(box: Sandbox) -> str:
    return str(box.commands.run("cat n; md5sum big").stdout)


def test_each_costs_what_changed_and_outlives_the_ones_before(settings: Settings, options: dict[str, str]) -> None:
    box = Sandbox.create("base", timeout=200, **options)  # type: ignore[arg-type]
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
        Sandbox.delete_snapshot(snapshot, **options)  # type: ignore[arg-type]
    time.sleep(1.5)  # the collection comes a moment later
    copies = [Sandbox.create(made[3], timeout=60, **options) for _ in range(2)]  # type: ignore[arg-type]
    assert [_state(copy) for copy in copies] == [states[3]] * 2
    again = copies[0].create_snapshot().snapshot_id  # of another disk: it begins a chain of its own
    for copy in copies:
        copy.kill()
    Sandbox.delete_snapshot(made[3], **options)  # type: ignore[arg-type]
    third = Sandbox.create(again, timeout=60, **options)  # type: ignore[arg-type]
    assert _state(third) == states[3]
    third.kill()
    Sandbox.delete_snapshot(again, **options)  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    while list(_layers(settings).iterdir()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert list(_layers(settings).iterdir()) == []


def test_a_pause_without_memory_goes_on_with_the_chain(settings: Settings, options: dict[str, str]) -> None:
    box = Sandbox.create("base", timeout=200, **options)  # type: ignore[arg-type]
    box.commands.run("head -c 33554432 /dev/urandom > big; echo 0 > n; sync")
    box.create_snapshot()
    before = _taken(settings)
    box.commands.run("echo 1 > n")
    box.pause(mode="filesystem")
    halted = Sandbox.create_snapshot(box.sandbox_id, **options)  # type: ignore[call-overload]
    assert _taken(settings) - before < 2 << 20
    copy = Sandbox.create(halted.snapshot_id, timeout=60, **options)  # type: ignore[arg-type]
    assert copy.commands.run("cat n").stdout == "1\n"
    copy.kill()
    box.kill()


def test_a_damaged_snapshot_is_refused_with_the_reason(settings: Settings, options: dict[str, str]) -> None:
    box = Sandbox.create("base", timeout=200, **options)  # type: ignore[arg-type]
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
        Sandbox.create(second, timeout=60, **options)  # type: ignore[arg-type]
    fine = Sandbox.create(first, timeout=60, **options)  # type: ignore[arg-type]
    assert fine.commands.run("cat n").stdout == "0\n"
    fine.kill()
    box.kill()
