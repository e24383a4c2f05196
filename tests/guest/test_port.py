from __future__ import annotations

import asyncio
import os
import socket

import pytest

from sandyard.errors import GuestError, GuestErrorCode
from sandyard.guest import LinkAgent, PortStream
from tests.guest.conftest import RunningAgent, eventually


async def read_all(stream: PortStream) -> bytes:
    found = bytearray()
    while data := await stream.read():
        found += data
    return bytes(found)


async def echo_until_eof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await reader.read()
    writer.write(b"got %d:" % len(data) + data)
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_half_close_and_bulk(agent: LinkAgent, running: RunningAgent, host: str) -> None:
    try:
        server = await asyncio.start_server(echo_until_eof, host, 0)
    except OSError:
        pytest.skip(f"no {host} here")
    before = running.descriptors()
    data = os.urandom(3_000_000)
    async with server:
        stream = await agent.connect_port(server.sockets[0].getsockname()[1])

        async def send() -> None:
            await stream.write(data)
            await stream.write_eof()

        answer, _ = await asyncio.gather(read_all(stream), send())
        assert answer == b"got 3000000:" + data
        assert await stream.read() == b""
        await stream.close()
    await eventually(lambda: running.descriptors() == before)
    assert (await agent.hello())["streams"] == "0"


async def test_small_reads(agent: LinkAgent) -> None:
    server = await asyncio.start_server(echo_until_eof, "127.0.0.1", 0)
    async with server:
        stream = await agent.connect_port(server.sockets[0].getsockname()[1])
        await stream.write(b"abc")
        await stream.write_eof()
        assert [await stream.read(3) for _ in range(4)] == [b"got", b" 3:", b"abc", b""]
        await stream.close()


async def test_nothing_listens(agent: LinkAgent) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(GuestError) as caught:
            await agent.connect_port(port)
    assert caught.value.code == GuestErrorCode.REFUSED
    for bad in (0, -1, 65_536):
        with pytest.raises(GuestError) as caught:
            await agent.connect_port(bad)
        assert caught.value.code == GuestErrorCode.INVALID


async def test_close_reaches_the_server(agent: LinkAgent) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        stream = await agent.connect_port(server.sockets[0].getsockname()[1])
        await stream.close()
        await stream.close()
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_reset_is_an_error_and_a_slow_server_holds_the_writer(agent: LinkAgent) -> None:
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.transport.abort()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        stream = await agent.connect_port(server.sockets[0].getsockname()[1])
        writing = asyncio.ensure_future(stream.write(b"x" * 30_000_000))
        await asyncio.sleep(0.3)
        assert not writing.done()
        release.set()
        with pytest.raises(GuestError):
            await writing
        await stream.close()
