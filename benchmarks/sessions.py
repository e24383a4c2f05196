"""Many sessions at once through the SDK: each makes a sandbox, runs a command, writes and reads a file, and ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from e2b import AsyncSandbox

from benchmarks.measure import Figure, Report
from sandyard.connection import Connection

SESSIONS = 512
ALONE = 8  # sessions one by one, whose operations are the peers
OPERATIONS = ("create", "command", "write", "read", "kill")
PATIENCE = 300.0  # seconds a request may take while all the others run: none may be given up
T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """Milliseconds of each operation of each session, and what went wrong."""

    samples: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in OPERATIONS})
    errors: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    async def timed(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        started = time.perf_counter()
        result = await call()
        self.samples[name].append((time.perf_counter() - started) * 1e3)
        return result


async def concurrent(report: Report, connection: Connection, count: int = SESSIONS) -> None:
    """`count` sessions start together, and none ends before all have their sandbox. Beside sessions one by one."""
    alone = Tally()
    for number in range(ALONE):
        await _session(connection, alone, asyncio.Barrier(1), number)
    for name in OPERATIONS:
        report.add(Figure(f"one session: {name}", alone.samples[name]))
    tally = Tally()
    gate = asyncio.Barrier(count)
    started = time.perf_counter()
    await asyncio.gather(*(_session(connection, tally, gate, number) for number in range(count)))
    seconds = time.perf_counter() - started
    for name in OPERATIONS:
        note = f"p99 {_p99(tally.samples[name]):.0f} ms"
        report.add(Figure(f"{count} sessions: {name}", tally.samples[name], peer=f"one session: {name}", note=note))
    rate = len(OPERATIONS) * count / seconds
    note = f"{tally.most_open} sandboxes at once; all done in {seconds:.1f} s; {rate:.0f} operations a second"
    errors = [*alone.errors, *tally.errors]
    if errors:
        note = f"{note}; the first: {errors[0][:200]}"
    report.add(Figure(f"{count} sessions: errors", [float(len(errors))], "", budget=0, note=note))


async def _session(connection: Connection, tally: Tally, gate: asyncio.Barrier, number: int) -> None:
    options = connection.sdk_options()
    box: AsyncSandbox | None = None
    try:
        box = await tally.timed(
            "create", lambda: AsyncSandbox.create("base", timeout=3600, request_timeout=PATIENCE, **options)
        )
        tally.open += 1
        tally.most_open = max(tally.most_open, tally.open)
    except Exception as error:  # noqa: BLE001 - every failure is a result
        tally.errors.append(f"create: {type(error).__name__}: {error}")
    await gate.wait()
    if box is not None:
        await _use(box, tally, number)


async def _use(box: AsyncSandbox, tally: Tally, number: int) -> None:
    text = f"session {number}\n" * 64
    try:
        run = await tally.timed(
            "command", lambda: box.commands.run(f"echo $(({number} + 1))", timeout=PATIENCE, request_timeout=PATIENCE)
        )
        assert run.stdout == f"{number + 1}\n", run.stdout
        await tally.timed("write", lambda: box.files.write("/home/user/note", text, request_timeout=PATIENCE))
        found = await tally.timed("read", lambda: box.files.read("/home/user/note", request_timeout=PATIENCE))
        assert found == text, found[:80]
    except Exception as error:  # noqa: BLE001 - every failure is a result
        tally.errors.append(f"session {number}: {type(error).__name__}: {error}")
    try:
        assert await tally.timed("kill", lambda: box.kill(request_timeout=PATIENCE)), "it was gone already"
        tally.open -= 1
    except Exception as error:  # noqa: BLE001 - every failure is a result
        tally.errors.append(f"kill {number}: {type(error).__name__}: {error}")


def _p99(samples: list[float]) -> float:
    ordered = sorted(samples) or [0.0]
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
