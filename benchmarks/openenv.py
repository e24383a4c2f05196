"""The OpenEnv server beside the official one: steps a second over many sessions, and the set-up of one.

The official server runs in an environment of its own (`OPENENV_PYTHON`, else the one that `make compat
PARTS=openenv` made): its package and ours are never imported together. The same client, in this
process, drives both with the same messages, turn about.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.measure import Figure, Report
from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.server import OpenEnvServer, ServerOptions

ROOT = Path(__file__).resolve().parents[1]
SESSIONS = 64
STEPS = 100  # of each session and round
ROUNDS = 3
_RESET = '{"type":"reset","data":{}}'
_STEP = '{"type":"step","data":{"message":"x"}}'
_HELLO = (
    b"GET /ws HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def beside_official(report: Report) -> None:
    """Adds the figures, or says why there is nothing to set ours beside."""
    python = os.environ.get("OPENENV_PYTHON") or str(ROOT / ".cache/compat/openenv-0.10.0/bin/python")
    if shutil.which(python) is None:
        report.skip("OpenEnv", "no official server; run: make compat PARTS=openenv, or set OPENENV_PYTHON")
        return
    ours: dict[str, list[float]] = {"steps": [], "set-up": []}
    theirs: dict[str, list[float]] = {"steps": [], "set-up": []}
    options = ServerOptions(EnvSpec("echo"), port=0)
    async with _official(python) as official, OpenEnvServer(options) as server:
        for _ in range(ROUNDS):
            for url, samples in ((official, theirs), (server.url, ours)):
                samples["steps"].append(await steps_per_second(url))
                samples["set-up"] += [await set_up(url) for _ in range(20)]
    for name, unit, better in (("steps", "1/s", True), ("set-up", "ms", False)):
        what = f"OpenEnv, {SESSIONS} sessions: steps" if better else "OpenEnv: connect, reset, close"
        peer = f"official {what}"
        report.add(Figure(peer, theirs[name], unit, higher_is_better=better))
        report.add(Figure(what, ours[name], unit, peer=peer, higher_is_better=better))


async def steps_per_second(url: str) -> float:
    """All sessions are open and reset before the clock starts."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    players = [(await loop.create_connection(Player, host, int(port)))[1] for _ in range(SESSIONS)]
    try:
        await asyncio.gather(*(player.ready for player in players))
        started = time.perf_counter()
        await asyncio.gather(*(player.play(STEPS) for player in players))
        return SESSIONS * STEPS / (time.perf_counter() - started)
    finally:
        for player in players:
            player.leave()


class Player(asyncio.Protocol):
    """A client with next to no cost of its own, which would else hide that of the servers: frames made
    once, answers counted by their headers and not read."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()
        self._buffer = b""
        self._left = 0
        self._greeted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_HELLO)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._greeted:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._greeted, self._buffer = True, rest
            if b" 101 " not in head:
                self._fail(f"the server answered {head!r:.200}")
            self._transport.write(_frame(_RESET))
        while (size := _frame_size(self._buffer)) and len(self._buffer) >= size:
            answer, self._buffer = self._buffer[:size], self._buffer[size:]
            self._heard(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server closed the connection: {error}")

    async def play(self, steps: int) -> None:
        self._left = steps
        self._transport.write(_STEP_FRAME)
        await self._done

    def leave(self) -> None:
        for future in (self.ready, self._done):
            future.cancel()
        self._transport.abort()

    def _heard(self, answer: bytes) -> None:
        if b'"observation"' not in answer[:64]:
            self._fail(f"the server answered {answer!r:.200}")
        elif not self.ready.done():
            self.ready.set_result(None)
        else:
            self._left -= 1
            if self._left:
                self._transport.write(_STEP_FRAME)
            else:
                self._done.set_result(None)

    def _fail(self, why: str) -> None:
        for future in (self.ready, self._done):
            if not future.done():
                future.set_exception(RuntimeError(why))


def _frame(text: str) -> bytes:
    """A masked text frame; the mask is zero, so that the text stands as it is. Up to 125 bytes."""
    return bytes((0x81, 0x80 | len(text))) + bytes(4) + text.encode()


def _frame_size(data: bytes) -> int:
    """Bytes of the frame that `data` begins with; 0 while that is not known."""
    if len(data) < 4:
        return 0
    short = data[1] & 0x7F
    return 2 + short if short < 126 else 4 + int.from_bytes(data[2:4])


_STEP_FRAME = _frame(_STEP)


async def set_up(url: str) -> float:
    """Milliseconds."""
    started = time.perf_counter()
    connection = await _connect(url)
    await _ask(connection, _RESET)
    await connection.send('{"type":"close"}')
    await connection.wait_closed()
    return (time.perf_counter() - started) * 1e3


async def _ask(connection: ClientConnection, text: str) -> None:
    await connection.send(text)
    answer = json.loads(await connection.recv())
    if answer["type"] != "observation":
        raise RuntimeError(f"the server answered {answer}")


async def _connect(url: str) -> ClientConnection:
    return await connect(url.replace("http", "ws") + "/ws", compression=None, proxy=None)


@asynccontextmanager
async def _official(python: str) -> AsyncIterator[str]:
    """The address of the official server with room for all sessions."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    script = ROOT / "tests/compat/openenv_server.py"
    process = await asyncio.create_subprocess_exec(
        python, script, f"{port}", f"{2 * SESSIONS}", env=os.environ | {"PYTHONPATH": ""}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(120), httpx.AsyncClient() as web:
            while True:
                try:
                    await web.get(f"{url}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.2)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
