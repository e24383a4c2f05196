"""Creating and using sandboxes through the unmodified SDK, beside the bare engines of this host."""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

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


async def creation(report: Report, connection: Connection, name: str, budget: float, rounds: int) -> list[float]:
    """Create, run one command, read its result. Returns the milliseconds each kill took, which do not count."""
    boxes: list[AsyncSandbox] = []

    async def once() -> None:
        box = await AsyncSandbox.create("base", timeout=120, **connection.sdk_options())
        boxes.append(box)
        result = await box.commands.run("echo ready")
        assert result.stdout == "ready\n", result

    async def end() -> None:
        await boxes.pop().kill()

    samples, ends = [], []
    for index in range(rounds + 1):
        started = await timed_async(once, 1, warmup=0)
        ended = await timed_async(end, 1, warmup=0)
        if index:  # the first pays for the client's own start
            samples += started
            ends += ended
        await asyncio.sleep(1.0)  # the pool refills between rounds: a burst is measured apart
    report.add(Figure(name, samples, peer=engine_peer(report), budget=budget))
    return ends


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
    engine = engine_peer(report, bare=True)
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
    """One large file up and down over loopback: with the SDK, and with a plain HTTP client."""
    box = Sandbox.create("base", timeout=300, **connection.sdk_options())
    data = os.urandom(MEBIBYTE) * megabytes
    url = box.upload_url("/tmp/large.bin", user="user")
    download_url = box.download_url("/tmp/large.bin", user="user")
    moves: list[tuple[str, Callable[[], object], str]] = [
        ("upload", lambda: box.files.write("/tmp/large.bin", data), "SDK, multipart"),
        ("upload, plain HTTP", lambda: _http("POST", url, data, megabytes), "octet-stream"),
        ("download", lambda: box.files.read("/tmp/large.bin", format="bytes"), "the SDK's own cost is most of it"),
        ("download, plain HTTP", lambda: _http("GET", download_url, None, megabytes), ""),
    ]
    try:
        for name, move, note in moves:
            samples = [megabytes / milliseconds * 1e3 for milliseconds in timed(move, 5)]
            report.add(
                Figure(name, samples, "MB/s", "cat through a pipe", higher_is_better=True, budget=300, note=note)
            )
    finally:
        box.kill()


def _http(method: str, url: str, body: bytes | None, megabytes: int) -> None:
    parts = urlsplit(url)
    assert parts.hostname
    client = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        client.request(method, f"{parts.path}?{parts.query}", body, {"Content-Type": "application/octet-stream"})
        answer = client.getresponse()
        size = sum(map(len, iter(lambda: answer.read(MEBIBYTE), b"")))
        assert answer.status == 200, answer.status
        assert method == "POST" or size == megabytes * MEBIBYTE, size
    finally:
        client.close()


def pipe(report: Report, rootfs: Path, megabytes: int = 128) -> None:
    """The same bytes into `cat > file` in a bare sandbox: what moving them costs with no server."""
    if peers.bwrap(rootfs) is None:
        report.skip("cat through a pipe", "bwrap is not installed")
        return
    data = os.urandom(MEBIBYTE) * megabytes
    samples = [megabytes / s * 1e3 for s in timed(lambda: peers.bwrap_write(rootfs, data), 3)]
    report.add(Figure("cat through a pipe", samples, "MB/s", higher_is_better=True))


async def idle_memory(report: Report, connection: Connection, rootfs: Path, server: int, count: int = 16) -> None:
    """Host memory of idle sandboxes: what lives in them, and what the server process grew by."""
    before = peers.pss_of([server])
    boxes = await asyncio.gather(
        *(AsyncSandbox.create("base", timeout=120, **connection.sdk_options()) for _ in range(count))
    )
    await asyncio.sleep(2.0)
    grown = peers.pss_of([server]) - before
    each = (peers.pss_of(peers.pids_in_groups(box.sandbox_id for box in boxes)) + grown) / count / MEBIBYTE
    await asyncio.gather(*(box.kill() for box in boxes))
    engine = engine_peer(report, bare=True)
    if engine is not None:
        with peers.bundle(engine, rootfs, ["sleep", "600"]) as folder:
            report.add(Figure(f"{engine} sleep, idle", [peers.pss_of_containers(engine, folder, 4)], "MiB"))
    peer = f"{engine} sleep, idle" if engine else None
    report.add(Figure("idle sandbox", [each], "MiB", peer=peer, budget=3, note="PSS; its share of the server included"))


def engine_peer(report: Report, bare: bool = False) -> str | None:
    for engine in ("crun", "runc"):
        if report.find(f"{engine} true") is not None:
            return engine if bare else f"{engine} true"
    return None
