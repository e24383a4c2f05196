"""Pausing and copying sandboxes through the SDK, and how long a sandbox stands still for a snapshot."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from e2b import Sandbox

from benchmarks.measure import Figure, Report, timed
from sandyard.connection import Connection

WRITTEN = 64 << 20
MUCH, LITTLE = 1_000_000_000, 1 << 20
CHILDREN = 16
COPY = f"cp of {WRITTEN >> 20} MiB"
# Prints the longest gap between two looks at the clock, in milliseconds, once its stdin ends.
_TICKS = """
import select, sys, time
last, worst = time.monotonic(), 0.0
while not select.select([sys.stdin], [], [], 0)[0]:
    time.sleep(0.0005)
    now = time.monotonic()
    last, worst = now, max(worst, now - last)
print(worst * 1000)
"""


def standing_still(report: Report, connection: Connection, home: Path, rounds: int) -> None:
    """`home` is where the node keeps its disks: the peer writes there too."""
    _peer(report, home)
    options = connection.sdk_options()
    box = Sandbox.create("base", timeout=600, **options)
    try:
        box.files.write("/home/user/blob", os.urandom(WRITTEN))
        _moves(report, box, rounds)
        _snapshots(report, box, connection, max(rounds // 4, 3))
        _forks(report, box)
    finally:
        box.kill()
    _increments(report, connection, home, max(rounds // 4, 3))


def _peer(report: Report, home: Path) -> None:
    with tempfile.TemporaryDirectory(dir=home) as name:
        source, target = Path(name, "source"), Path(name, "target")
        source.write_bytes(os.urandom(WRITTEN))
        command = ["cp", "--reflink=auto", str(source), str(target)]

        def copy() -> None:
            subprocess.run(command, check=True)
            subprocess.run(["sync", str(target)], check=True)

        report.add(Figure(COPY, timed(copy, 5)))


def _moves(report: Report, box: Sandbox, rounds: int) -> None:
    kept, went_on, halted, booted = [], [], [], []
    for _ in range(rounds):
        kept += timed(box.pause, 1, 0)
        went_on += timed(lambda: box.connect(timeout=600), 1, 0)
    for _ in range(max(rounds // 4, 3)):
        halted += timed(lambda: box.pause(mode="filesystem"), 1, 0)
        booted += timed(lambda: box.connect(timeout=600), 1, 0)
    report.add(Figure("pause, with memory", kept, budget=100))
    report.add(Figure("resume, with memory", went_on, budget=50))
    report.add(Figure("pause, files only", halted, peer=COPY, note=f"{WRITTEN >> 20} MiB dirty at first"))
    report.add(Figure("resume, files only", booted, note="boots"))


def _snapshots(report: Report, box: Sandbox, connection: Connection, rounds: int) -> None:
    ticks = box.commands.run(f"python3 -c '{_TICKS}'", background=True, stdin=True)
    time.sleep(1.0)
    quiet = _gap(box, ticks)
    taken, still, started = [], [], []
    for _ in range(rounds):
        ticks = box.commands.run(f"python3 -c '{_TICKS}'", background=True, stdin=True)
        time.sleep(0.3)
        made: list[str] = []
        taken += timed(lambda: made.append(box.create_snapshot().snapshot_id), 1, 0)  # noqa: B023 - called at once
        still.append(_gap(box, ticks))
        copies: list[Sandbox] = []
        options = connection.sdk_options()
        started += timed(lambda: copies.append(Sandbox.create(made[0], timeout=60, **options)), 1, 0)  # noqa: B023
        copies[0].kill()
        Sandbox.delete_snapshot(made[0], **options)
    name = f"snapshot, {WRITTEN >> 20} MiB written"
    report.add(Figure(name, taken, peer=COPY, note="on the host's disk when answered"))
    report.add(Figure("  of that, standing still", still, note=f"as seen inside; {quiet:.1f} ms with no snapshot"))
    report.add(Figure("create from a snapshot", started))


def _increments(report: Report, connection: Connection, home: Path, rounds: int) -> None:
    """Snapshots of a sandbox that has written much, and little since the last one."""
    options = connection.sdk_options()
    box = Sandbox.create("base", timeout=600, **options)
    made: list[str] = []
    try:
        box.commands.run(f"head -c {MUCH} /dev/urandom > much", timeout=120)
        first = timed(lambda: made.append(box.create_snapshot().snapshot_id), 1, 0)
        report.add(Figure(f"first snapshot, {MUCH // 1_000_000_000} GB written", first))
        _next_ones(report, box, made, home, rounds)
        for name, note in (("first", "its image is put together"), ("again", "")):
            copies: list[Sandbox] = []
            start = timed(lambda: copies.append(Sandbox.create(made[-1], timeout=60, **options)), 1, 0)  # noqa: B023
            copies[0].kill()
            report.add(Figure(f"create from such a one, {name}", start, note=note))
    finally:
        box.kill()
        for snapshot in made:
            Sandbox.delete_snapshot(snapshot, **options)


def _next_ones(report: Report, box: Sandbox, made: list[str], home: Path, rounds: int) -> None:
    """With the sandbox at rest, and while it writes."""
    change = f"head -c {LITTLE} /dev/urandom > little"
    for busy in (False, True):
        taken: list[float] = []
        still: list[float] = []
        costs: list[float] = []
        for _ in range(rounds):
            box.commands.run(change)
            writer = box.commands.run(f"while sleep 0.01; do {change}; sync; done", background=True) if busy else None
            before = _used(home)
            ticks = box.commands.run(f"python3 -c '{_TICKS}'", background=True, stdin=True)
            time.sleep(0.3)
            taken += timed(lambda: made.append(box.create_snapshot().snapshot_id), 1, 0)
            still.append(_gap(box, ticks))
            costs.append((_used(home) - before) / (1 << 20))
            if writer is not None:
                writer.kill()
        note = f"{max(costs, default=0.0):.1f} MiB of disk each"
        report.add(Figure(f"next ones, {LITTLE >> 20} MiB changed{', it writes' if busy else ''}", taken, note=note))
        report.add(Figure("  of that, standing still" + (", it writes" if busy else ""), still, note="as seen inside"))


def _used(home: Path) -> int:
    """Bytes on disk of the layers below a node's state."""
    return sum(path.stat().st_blocks * 512 for path in home.rglob("layers/*") if path.is_file())


def _gap(box: Sandbox, ticks: object) -> float:
    box.commands.close_stdin(ticks.pid)  # type: ignore[attr-defined]
    return float(ticks.wait().stdout)  # type: ignore[attr-defined]


def _forks(report: Report, box: Sandbox) -> None:
    children: list[object] = []
    one = timed(lambda: children.extend(box.fork(timeout=60)), 3, 0)
    many = timed(lambda: children.extend(box.fork(count=CHILDREN, timeout=60)), 2, 0)
    for child in children:
        assert isinstance(child, Sandbox), child
        child.kill()
    report.add(Figure("fork of 1", one))
    report.add(Figure(f"fork of {CHILDREN}", many, peer="fork of 1", note=f"{WRITTEN >> 20} MiB written"))
