"""A real S3 server as a process of its own on loopback, and a link to it that can be made bad."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from sandyard.store.blobs.s3 import Bucket, S3Blobs

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "yard", "AWS_SECRET_ACCESS_KEY": "sand"}
BUCKET = "snapshots"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def s3_server(home: Path) -> Iterator[str]:
    """Its endpoint; it has the empty bucket `BUCKET`. Whoever signs with `CREDENTIALS` gets in, as does anybody."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "s3.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **CREDENTIALS})
        try:
            _wait_for(port, process)
            endpoint = f"http://127.0.0.1:{port}"
            _make_bucket(endpoint)
            yield endpoint
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("the S3 server does not listen")


def _make_bucket(endpoint: str) -> None:
    httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()


def bucket(endpoint: str, prefix: str = "", timeout: float = 10.0) -> S3Blobs:
    return S3Blobs(Bucket(BUCKET, prefix, endpoint, timeout=timeout))


@pytest.fixture
def with_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@dataclass
class BadLink:
    """What the proxy does to requests; each list is used up from its front, one entry a connection.

    `answers`: statuses to give in the server's stead. `cut_after`: bytes of the answer (or, negative, of the
    request) after which the connection is closed. `delay`: seconds before anything is passed on."""

    endpoint: str = ""
    answers: list[tuple[int, str]] = field(default_factory=list)
    always: tuple[int, str] | None = None
    only: bytes = b""  # of a method, where `always` is not for all
    cut_after: list[int] = field(default_factory=list)
    delay: float = 0.0
    connections: int = 0


@asynccontextmanager
async def bad_link(endpoint: str) -> AsyncIterator[BadLink]:
    """A proxy before an S3 server: one request a connection."""
    state = BadLink()
    port = int(endpoint.rpartition(":")[2])
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        state.connections += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await _one(state, port, reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    state.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def _one(state: BadLink, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    cut = state.cut_after.pop(0) if state.cut_after else None
    if cut is not None and cut < 0:
        await reader.readexactly(min(-cut, length))
        return
    body = await reader.readexactly(length)
    if state.delay:
        await asyncio.sleep(state.delay)
    wanted = state.answers.pop(0) if state.answers else state.always
    if wanted is not None and (state.answers or not state.only or head.startswith(state.only)):
        status, code = wanted
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        if head.startswith(b"HEAD"):
            content = b""
        writer.write(f"HTTP/1.1 {status} No\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        return
    await _pass_on(port, head, body, writer, cut)


async def _pass_on(port: int, head: bytes, body: bytes, writer: asyncio.StreamWriter, cut: int | None) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)
    try:
        back.write(head[:-2] + b"connection: close\r\n\r\n" + body)
        await back.drain()
        passed = 0
        while data := await there.read(1 << 16):
            if cut is not None:
                data = data[: max(0, cut - passed)]
            passed += len(data)
            writer.write(data)
            await writer.drain()
            if cut is not None and passed >= cut:
                return
    finally:
        back.close()
