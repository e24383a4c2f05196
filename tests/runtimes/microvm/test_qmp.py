"""The control socket's client against peers that behave, and that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandyard.runtimes.microvm.qmp import LINE_MAX, Qmp, QmpError

GREETING = b'{"QMP": {"version": {"qemu": {"micro": 13, "minor": 0, "major": 10}}, "capabilities": []}}\n'
DEEP = b"[" * (LINE_MAX // 2) + b"\n"
Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(path: Path, peer: Peer) -> AsyncIterator[None]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await peer(reader, writer)
        except ConnectionError:
            pass  # the client left, as it should
        finally:
            writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


async def obedient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    while line := await reader.readline():
        request = json.loads(line)
        name = request["execute"]
        writer.write(b'{"event": "STOP", "data": {"reason": "asked"}}\n')
        if name == "bad":
            answer: dict[str, object] = {"error": {"class": "GenericError", "desc": "no such thing"}}
        else:
            answer = {"return": {"name": name, "arguments": request.get("arguments")}}
        writer.write(json.dumps({**answer, "id": request["id"]}).encode() + b"\n")


async def test_commands_answers_and_events(tmp_path: Path) -> None:
    events: list[tuple[str, object]] = []
    async with served(tmp_path / "q", obedient):
        client = await Qmp.connect(tmp_path / "q", 5, lambda name, data: events.append((name, dict(data))))
        try:
            assert client.version == "10.0.13"
            answers = await asyncio.gather(*(client.execute(f"c{n}", {"n": n}) for n in range(5)))
            assert answers == [{"name": f"c{n}", "arguments": {"n": n}} for n in range(5)]
            with pytest.raises(QmpError, match="no such thing") as caught:
                await client.execute("bad")
            assert caught.value.kind == "GenericError"
            assert events[-1] == ("STOP", {"reason": "asked"})
        finally:
            await client.close()
        with pytest.raises(QmpError, match="was closed"):
            await client.execute("late")


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(QmpError, match="no QEMU answers"):
        await Qmp.connect(tmp_path / "q", 1)


@pytest.mark.parametrize(
    "said",
    [b"{}\n", b"hello\n", b"[1]\n", b"", b"x" * (LINE_MAX + 2), DEEP],
    ids=["empty", "text", "list", "eof", "long", "deep"],
)
async def test_a_greeting_that_is_not_qemu(tmp_path: Path, said: bytes) -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()

    async with served(tmp_path / "q", peer):
        with pytest.raises(QmpError):
            await Qmp.connect(tmp_path / "q", 5)


async def test_a_silent_peer(tmp_path: Path) -> None:
    async def greets_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readline()
        writer.write(b'{"return": {}, "id": 1}\n')
        await reader.read()

    async with served(tmp_path / "q", greets_only):
        client = await Qmp.connect(tmp_path / "q", 5)
        with pytest.raises(QmpError, match="did not answer query within"):
            await client.execute("query", timeout=0.05)
        await client.close()


async def test_a_peer_that_dies_fails_what_waits(tmp_path: Path) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readline()
        writer.write(b'{"return": {}, "id": 1}\n')
        await reader.readline()

    async with served(tmp_path / "q", dies):
        client = await Qmp.connect(tmp_path / "q", 5)
        with pytest.raises(QmpError, match="closed its control connection"):
            await client.execute("query")
        await client.close()


async def test_an_answer_of_no_depth_that_can_be_read_is_the_end(tmp_path: Path) -> None:
    async def deep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readline()
        writer.write(b'{"return": {}, "id": 1}\n')
        await reader.readline()
        writer.write(DEEP)
        await reader.read()

    async with served(tmp_path / "q", deep):
        client = await Qmp.connect(tmp_path / "q", 5)
        for _ in range(2):  # what waits is told, and what comes later
            with pytest.raises(QmpError, match="not its protocol"):
                await client.execute("query")
        await client.close()
