"""Creating and using sandboxes through the unmodified SDK, beside the bare engines of this host."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

from e2b import AsyncSandbox, Sandbox

from benchmarks import peers
from benchmarks.measure import Figure, Report, timed, timed_async
from sandyard.connection import Connection

BURST = 64
MEBIBYTE = 1 << 20


def bare_engines(report: Report, rootfs: Path, rounds: int) -> None:
    """`true` in a bare sandbox of each engine: the floor of what a start costs here."""
    candidate = peers.bwrap(rootfs)
    _measure_peer(report, "bwrap true", candidate, rounds)
    for engine in ("crun", "runc", "podman"):
        if shutil.which(engine) is None:
            report.skip(f"{engine} true", "not installed")
        elif engine == "podman":
            command = ["podman", "run", "--rm", "--network", "none", "--rootfs", str(rootfs), "true"]
            _measure_peer(report, "podman true", lambda command=command: peers.run_quietly(command), rounds)
        else:
            with peers.bundle(engine, rootfs, ["true"]) as folder:
                _measure_peer(report, f"{engine} true", peers.engine_run(engine, folder), rounds)


def _measure_peer(report: Report, name: str, run: object, rounds: int) -> None:
    reason = peers.works(run)  # type: ignore[arg-type]
    if reason is not None:
        report.skip(name, reason)
        return
    report.add(Figure(name, timed(run, rounds)))  # type: ignore[arg-type]


async def creation(report: Report, connection: Connection, name: str, budget: float, rounds: int) -> None:
    """Create, run one command, read its result; the sandbox is killed outside the measured time."""
    boxes: list[AsyncSandbox] = []

    async def once() -> None:
        box = await AsyncSandbox.create("base", timeout=120, **connection.sdk_options())
        boxes.append(box)
        result = await box.commands.run("echo ready")
        assert result.stdout == "ready\n", result

    samples = []
    for _ in range(rounds):
        samples += await timed_async(once, 1, warmup=0)
        await boxes.pop().kill()
        await asyncio.sleep(0.3)  # the pool refills between rounds: a burst is measured apart
    report.add(Figure(name, samples, peer=_engine_peer(report), budget=budget))


async def burst(report: Report, connection: Connection) -> None:
    """64 creates at once, each with a first result."""
    boxes: list[AsyncSandbox] = []

    async def one() -> None:
        box = await AsyncSandbox.create("base", timeout=120, **connection.sdk_options())
        boxes.append(box)
        assert (await box.commands.run("echo $((6*7))")).stdout == "42\n"

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(BURST)))
    seconds = time.perf_counter() - started
    report.add(
        Figure(f"burst of {BURST}: all ready", [seconds * 1e3], budget=2000, note="create + first result, cold pool")
    )
    await asyncio.gather(*(box.kill() for box in boxes))


def round_trips(report: Report, connection: Connection, rootfs: Path, rounds: int) -> None:
    """`true` in a sandbox that is there, through SDK and server, beside the engine's own exec."""
    engine = _engine_peer(report, bare=True)
    if engine is not None:
        with (
            peers.bundle(engine, rootfs, ["sleep", "600"]) as folder,
            peers.engine_container(engine, folder) as container,
        ):
            command = peers.with_clean_cgroups([engine, "exec", container, "true"])
            report.add(Figure(f"{engine} exec true", timed(lambda: peers.run_quietly(command), rounds)))
    box = Sandbox.create("base", timeout=300, **connection.sdk_options())
    try:
        peer = f"{engine} exec true" if engine else None
        report.add(
            Figure("exec through the SDK", timed(lambda: box.commands.run("true"), rounds, 5), peer=peer, budget=8)
        )
    finally:
        box.kill()


def files(report: Report, connection: Connection, megabytes: int = 128) -> None:
    """Upload and download of one large file over HTTP on loopback."""
    box = Sandbox.create("base", timeout=300, **connection.sdk_options())
    data = os.urandom(MEBIBYTE) * megabytes
    try:
        uploads = [megabytes / s * 1e3 for s in timed(lambda: box.files.write("/tmp/large.bin", data), 3)]
        downloads = [megabytes / s * 1e3 for s in timed(lambda: box.files.read("/tmp/large.bin", format="bytes"), 3)]
    finally:
        box.kill()
    report.add(Figure("upload", uploads, "MB/s", "cat through a pipe", higher_is_better=True, budget=300))
    report.add(Figure("download", downloads, "MB/s", "cat through a pipe", higher_is_better=True, budget=300))


def pipe(report: Report, rootfs: Path, megabytes: int = 128) -> None:
    """The same bytes into `cat > file` in a bare sandbox: what moving them costs with no server."""
    if peers.bwrap(rootfs) is None:
        report.skip("cat through a pipe", "bwrap is not installed")
        return
    data = os.urandom(MEBIBYTE) * megabytes
    samples = [megabytes / s * 1e3 for s in timed(lambda: peers.bwrap_write(rootfs, data), 3)]
    report.add(Figure("cat through a pipe", samples, "MB/s", higher_is_better=True))


async def idle_memory(report: Report, connection: Connection, rootfs: Path, count: int = 16) -> None:
    """Host memory of idle sandboxes: the proportional set size of every process that stays for them."""
    before = peers.total_pss()
    boxes = await asyncio.gather(
        *(AsyncSandbox.create("base", timeout=120, **connection.sdk_options()) for _ in range(count))
    )
    await asyncio.sleep(2.0)
    each = (peers.total_pss() - before) / count / MEBIBYTE
    await asyncio.gather(*(box.kill() for box in boxes))
    engine = _engine_peer(report, bare=True)
    if engine is not None:
        with peers.bundle(engine, rootfs, ["sleep", "600"]) as folder:
            report.add(Figure(f"{engine} sleep, idle", [peers.pss_of_containers(engine, folder, 4)], "MiB"))
    peer = f"{engine} sleep, idle" if engine else None
    report.add(
        Figure("idle sandbox", [each], "MiB", peer=peer, budget=3, note="host memory, PSS, server growth included")
    )


def _engine_peer(report: Report, bare: bool = False) -> str | None:
    for engine in ("crun", "runc"):
        if report.find(f"{engine} true") is not None:
            return engine if bare else f"{engine} true"
    return None
