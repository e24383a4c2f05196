"""Sessions of the back end `process`: 1,000 of them live at once, beside bare interpreters of the same run."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.measure import Figure, Report, timed_async
from sandyard.envs.process.plan import find_interpreter
from sandyard.envs.process.server import SessionServer
from sandyard.envs.process.session import ProcessSession

SESSIONS = 1000
PEERS = 40
_SAMPLED = 25  # sessions whose memory is looked at: reading it costs more than the session
_ROUNDS = 300
_READY = "print(1, flush=True)\nfor line in __import__('sys').stdin: exec(line); print(1, flush=True)"
_WORK = "import json, math\nx = {n: str(n) for n in range(100)}"


async def live(report: Report, count: int = SESSIONS) -> None:
    """Open `count` sessions, let each run a program, and look at what they hold."""
    _room_for(count)
    names = _peers(report)
    async with SessionServer() as server:
        await server.start()
        before, started = _available(), time.perf_counter()
        sessions, opened = await _open(server, count)
        seconds, held = time.perf_counter() - started, before - _available()
        pss = [_pss(pid) for pid in _processes(server)[: 2 * _SAMPLED]]
        own = [session + init for session, init in zip(pss[::2], pss[1::2], strict=False)]
        picked = iter(sessions[n % count] for n in range(_ROUNDS + 10))
        trips = await timed_async(lambda: next(picked).run("print(len(x))"), _ROUNDS, warmup=10)
        closing = time.perf_counter()
        await asyncio.gather(*(session.close() for session in sessions))
        closed = (time.perf_counter() - closing) * 1e3 / count
    note = f"all {count} in {seconds:.1f} s; open and first program"
    report.add(Figure("process: open a session", opened, peer=names["start"], note=note))
    report.add(Figure("process: round trip", trips, peer=names["trip"], note=f"with {count} sessions live"))
    note = f"of {len(own)} sessions after a small program, with their process 1"
    report.add(Figure("process: PSS of a session", own, "MiB", peer=names["memory"], budget=24.0, note=note))
    note = f"{count} live at once; what they took of the machine's memory"
    report.add(Figure("process: memory of a session", [held / count], "MiB", budget=24.0, note=note))
    report.add(Figure("process: close a session", [closed], note="all at once"))


async def _open(server: SessionServer, count: int) -> tuple[list[ProcessSession], list[float]]:
    sessions, samples = [], []
    for _ in range(count):
        started = time.perf_counter()
        session = await server.open()
        result = await session.run(_WORK, 60)
        samples.append((time.perf_counter() - started) * 1e3)
        assert result.exit_code == 0, result
        sessions.append(session)
    return sessions, samples


def _peers(report: Report) -> dict[str, str]:
    """Bare `python -I` processes that read programs, and the same in bubblewrap; returns the peers' names."""
    python = find_interpreter().program
    _peer(report, "python -I", [python, "-I", "-c", _READY])
    if shutil.which("bwrap"):
        box = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all"]
        try:
            _peer(report, "bwrap python", [*box, "--die-with-parent", python, "-I", "-c", _READY])
        except (OSError, RuntimeError) as error:
            report.skip("bwrap python", str(error))
    else:
        report.skip("bwrap python", "bubblewrap is not installed")
    return {what: f"python -I: {what}" for what in ("start", "trip", "memory")}


def _peer(report: Report, name: str, command: Sequence[str]) -> None:
    started, trips, memory, live = [], [], [], []
    try:
        for _ in range(PEERS):
            begin = time.perf_counter()
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            live.append(process)
            _ask(process, None)
            _ask(process, f"exec({_WORK!r})\n")
            started.append((time.perf_counter() - begin) * 1e3)
        for process in live * 4:
            begin = time.perf_counter()
            _ask(process, "len(x)\n")
            trips.append((time.perf_counter() - begin) * 1e3)
        memory = [sum(_pss(pid) for pid in _family(process.pid)) for process in live]
    finally:
        for process in live:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    report.add(Figure(f"{name}: start", started))
    report.add(Figure(f"{name}: trip", trips))
    report.add(Figure(f"{name}: memory", memory, "MiB"))


def _ask(process: subprocess.Popen[str], line: str | None) -> None:
    assert process.stdin
    assert process.stdout
    if line is not None:
        process.stdin.write(line)
        process.stdin.flush()
    if process.stdout.readline() != "1\n":
        raise RuntimeError(f"{process.args!r} does not answer")


def _processes(server: SessionServer) -> list[int]:
    """Process ids of sessions, those of one beside each other."""
    assert server._process is not None
    forker = _family(server._process._process.pid)[1]
    return [pid for pid in _family(forker) if pid != forker]


def _family(pid: int) -> list[int]:
    found = [pid]
    for member in found:
        with suppress(FileNotFoundError):
            found += [int(child) for child in Path(f"/proc/{member}/task/{member}/children").read_text().split()]
    return found


def _pss(pid: int) -> float:
    """MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no Pss")


def _available() -> float:
    """MiB that this machine has left."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no MemAvailable")


def _room_for(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, max(soft, 4 * count))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
