"""The agent against hosts that break the protocol: it closes that link and goes on."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import pytest

from sandyard.errors import GuestError
from sandyard.guest import Channel, ExitStatus, ProcessSpec
from sandyard.guest.wire import HEADER, MAGIC, Frame, Op, text, texts, u8, u16, u32, u64
from tests.guest.conftest import RunningAgent, collect

HELLO = HEADER.pack(6, Frame.HELLO, 0, 0, 0) + MAGIC + u16(1)


def frame(kind: int, channel: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, channel, flags, stream) + payload


def spawn(*argv: str, stdin: bool = False) -> bytes:
    return u8(stdin) + u16(0) + u16(0) + text("") + text("") + texts(argv) + texts([])


class RawHost:
    """A host that says what it likes. A context manager: leaving closes the socket."""

    def __init__(self, running: RunningAgent, *, greet: bool = True) -> None:
        self.socket = running.socket()
        if greet:
            self.socket.sendall(HELLO)
            assert self.frame()[0] == Frame.HELLO

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def frame(self) -> tuple[int, int, int, int, bytes]:
        """Type, channel, flags, stream, payload; EOFError when the agent closed the link."""
        length, kind, channel, flags, stream = HEADER.unpack(self._exactly(HEADER.size))
        return kind, channel, flags, stream, self._exactly(length)

    def frames(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        while True:
            try:
                yield self.frame()
            except (EOFError, ConnectionResetError):
                return

    def is_closed_after(self, data: bytes) -> bool:
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return True
        for _ in self.frames():
            pass
        return True  # else the socket's timeout has raised


async def healthy(running: RunningAgent) -> None:
    agent = await running.connect()
    process = await agent.spawn(ProcessSpec(["echo", "fine"]))
    assert await collect(process) == {Channel.STDOUT: b"fine\n"}
    assert await process.wait() == ExitStatus(code=0)
    hello = await agent.hello()
    assert hello["streams"] == "0"
    await agent.close()


async def kill_all(running: RunningAgent) -> None:
    """Every process listed; one that has not reached its exec yet is listed by a later call."""
    agent = await running.connect()
    for pid in await agent.processes():
        with suppress(GuestError):  # it may have ended since
            await (await agent.attach(pid)).signal(9)
    await agent.close()
    await asyncio.sleep(0.05)


VIOLATIONS = {
    "a huge length": struct.pack("<IBBHI", 0xFFFFFFFF, Frame.DATA, 0, 0, 1),
    "a length just over": HEADER.pack(65_537, Frame.OPEN, Op.PING, 0, 1) + bytes(65_537),
    "type 0": frame(0, 0, 1),
    "type 9": frame(9, 0, 1),
    "type 255": frame(255, 255, 0xFFFFFFFF, b"x", 0xFFFF),
    "stream 0": frame(Frame.OPEN, Op.PING, 0),
    "a channel that is none": frame(Frame.DATA, 3, 1),
    "a stream opened twice": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1"))
    + frame(Frame.OPEN, Op.PING, 1),
    "an open cut in by another": frame(Frame.OPEN, Op.PING, 1, b"x", 2) + frame(Frame.OPEN, Op.PING, 2),
    "an open cut in by data": frame(Frame.OPEN, Op.PING, 1, b"x", 2) + frame(Frame.DATA, 0, 2, b"x"),
    "data beyond credit": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1", stdin=True))
    + frame(Frame.DATA, 0, 1, bytes(65_536)) * 4,
    "data out of channel": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1", stdin=True))
    + frame(Frame.DATA, 1, 1, b"x"),
    "data on a stream that takes none": frame(Frame.OPEN, Op.WATCH, 1, text("/tmp") + u8(0))
    + frame(Frame.DATA, 0, 1, b"x"),
    "too much credit": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1")) + frame(Frame.CREDIT, 1, 1, u32(2**31)),
    "credit that adds up": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1"))
    + frame(Frame.CREDIT, 1, 1, u32(2**30)) * 2,
    "credit on stdin": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1")) + frame(Frame.CREDIT, 0, 1, u32(1)),
    "short credit": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1")) + frame(Frame.CREDIT, 1, 1, b"\1"),
    "a result from the host": frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "1")) + frame(Frame.RESULT, 0, 1),
    "a bad hello": HEADER.pack(6, Frame.HELLO, 0, 0, 0) + b"HTTP" + u16(1),
    "a short hello": HEADER.pack(2, Frame.HELLO, 0, 0, 0) + b"SY",
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_closes_the_link_and_nothing_else(running: RunningAgent, name: str) -> None:
    with RawHost(running) as host:
        assert host.is_closed_after(VIOLATIONS[name])
    await healthy(running)


async def test_nothing_before_hello(running: RunningAgent) -> None:
    for first in (frame(Frame.OPEN, Op.PING, 1), frame(Frame.DATA, 0, 1, b"x"), b"GET / HTTP/1.1\r\n\r\n"):
        with RawHost(running, greet=False) as host:
            assert host.is_closed_after(first)
    await healthy(running)


async def test_another_version_is_told_ours(running: RunningAgent) -> None:
    host = RawHost(running, greet=False)
    host.socket.sendall(HEADER.pack(6, Frame.HELLO, 0, 0, 0) + MAGIC + u16(99))
    kind, _, _, _, payload = host.frame()
    assert (kind, payload[:6]) == (Frame.HELLO, MAGIC + u16(1))
    assert host.is_closed_after(frame(Frame.OPEN, Op.PING, 1))
    host.socket.close()
    await healthy(running)


async def test_every_request_cut_short_is_an_error_or_harmless(running: RunningAgent) -> None:
    requests = {
        Op.SPAWN: spawn("true", stdin=True),
        Op.ATTACH: u32(1),
        Op.SIGNAL: u32(1) + u32(9) + u8(1),
        Op.RESIZE: u32(1) + u16(1) + u16(1),
        Op.USER: text("root"),
        Op.STAT: text("/"),
        Op.LIST: text("/proc/self/fd") + u32(1),
        Op.MKDIR: text("/") + text("") + u32(0),
        Op.MOVE: text("/none") + text("/none/2") + text(""),
        Op.REMOVE: text("/none/at/all"),
        Op.READ: text("/dev/null") + u64(0) + u64(1),
        Op.WRITE: text("/dev/null") + text("") + u32(0),
        Op.STORE: text("/dev/null") + text("") + u32(0) + texts(["a", "b"]),
        Op.CONNECT: u16(1),
        Op.WATCH: text("/") + u8(0),
        Op.IDENTIFY: text("") + u64(0) + u32(4) + b"seed",
    }
    host = RawHost(running)
    stream = 0
    for op, request in requests.items():
        for cut in (*range(len(request)), None):
            for payload in (request[:cut], request[:cut] + bytes(random.Random(stream).randbytes(9))):
                stream += 1
                host.socket.sendall(frame(Frame.OPEN, op, stream, payload))
                host.socket.sendall(frame(Frame.RESET, 0, stream))
    host.socket.sendall(frame(Frame.OPEN, Op.PING, 999_999))
    for _, _, _, answered, _ in host.frames():
        if answered == 999_999:
            break
    host.socket.close()
    await healthy(running)


async def test_unknown_operations_are_errors(running: RunningAgent) -> None:
    host = RawHost(running)
    for op in (0, 19, 255):
        host.socket.sendall(frame(Frame.OPEN, op, 7))
        kind, _, flags, stream, payload = host.frame()
        assert (kind, flags, stream, payload[:2]) == (Frame.RESULT, 1, 7, u16(11))
    host.socket.close()


async def test_frames_for_streams_that_are_gone_are_ignored(running: RunningAgent) -> None:
    host = RawHost(running)
    for kind in (Frame.DATA, Frame.CREDIT, Frame.EOF, Frame.RESET):
        host.socket.sendall(frame(kind, 0, 5, b"xxxx"))
    host.socket.sendall(frame(Frame.OPEN, Op.PING, 5))
    assert host.frame()[0] == Frame.RESULT
    host.socket.close()


@pytest.mark.parametrize("seed", range(6))
async def test_random_bytes(running: RunningAgent, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(30):
        with running.socket() as raw:
            try:
                if source.random() < 0.7:
                    raw.sendall(HELLO)
                raw.sendall(source.randbytes(source.choice([1, 11, 12, 13, 100, 70_000])))
                if source.random() < 0.3:
                    raw.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                continue
    await healthy(running)


@pytest.mark.parametrize("seed", range(6))
async def test_valid_frames_in_random_order(running: RunningAgent, seed: int) -> None:
    """Streams opened, fed, credited and reset at random; the link may close, the agent may not."""
    source = random.Random(seed)
    opens = [
        (Op.SPAWN, spawn("cat", stdin=True)),
        (Op.SPAWN, spawn("sh", "-c", "echo a; echo b >&2; exec sleep 0.2")),
        (Op.SPAWN, u8(3) + u16(5) + u16(5) + text("") + text("/") + texts(["cat"]) + texts(["A=b"])),
        (Op.LIST, text("/usr/bin") + u32(1)),
        (Op.READ, text("/bin/sh") + u64(0) + u64(2**64 - 1)),
        (Op.WRITE, text("/dev/null") + text("") + u32(0)),
        (Op.STORE, text("/dev/null") + text("") + u32(0) + texts(["a", "b"])),
        (Op.WATCH, text("/tmp") + u8(0)),
        (Op.CONNECT, u16(9)),
        (Op.PROCESSES, b""),
        (Op.PING, b""),
    ]
    for _ in range(5):
        host = RawHost(running)
        try:
            for _ in range(120):
                stream = source.randrange(1, 12)
                kind = source.choice([Frame.OPEN, Frame.OPEN, Frame.DATA, Frame.CREDIT, Frame.EOF, Frame.RESET])
                op, request = source.choice(opens)
                if kind == Frame.OPEN:
                    host.socket.sendall(frame(Frame.RESET, 0, stream) + frame(kind, op, stream, request))
                elif kind == Frame.CREDIT:
                    host.socket.sendall(frame(kind, source.randrange(1, 3), stream, u32(source.randrange(100_000))))
                else:
                    data = source.randbytes(source.randrange(3000)) if kind == Frame.DATA else b""
                    host.socket.sendall(frame(kind, 0, stream, data))
        except (BrokenPipeError, ConnectionResetError):
            pass
        host.socket.close()
    await healthy(running)


async def test_the_link_dropped_at_every_step(running: RunningAgent) -> None:
    """Everything a session says, cut off after each of many prefixes."""
    request = spawn("sh", "-c", "cat; exit 1", stdin=True)
    session = (
        HELLO
        + frame(Frame.OPEN, Op.SPAWN, 1, request[:20], 2)
        + frame(Frame.OPEN, Op.SPAWN, 1, request[20:])
        + frame(Frame.DATA, 0, 1, b"hello" * 20)
        + frame(Frame.OPEN, Op.READ, 2, text("/bin/sh") + u64(0) + u64(2**64 - 1))
        + frame(Frame.OPEN, Op.LIST, 3, text("/usr/bin") + u32(2))
        + frame(Frame.EOF, 0, 1)
        + frame(Frame.RESET, 0, 2)
    )
    await healthy(running)
    await asyncio.sleep(0.1)
    before = running.descriptors()
    for cut in range(0, len(session), 3):
        with running.socket() as raw:
            raw.sendall(session[:cut])
    await healthy(running)
    end = time.monotonic() + 20
    while running.descriptors() > before:
        assert time.monotonic() < end, f"more than {before} still open: {running.open_files()}"
        await kill_all(running)


async def test_thousands_of_streams_meet_a_limit(running: RunningAgent) -> None:
    host = RawHost(running)
    count = 4200
    write = text("/dev/null") + text("") + u32(0)
    host.socket.settimeout(20)
    codes = []
    for stream in range(1, count + 1):
        host.socket.sendall(frame(Frame.OPEN, Op.WRITE, stream, write))
        codes.append(struct.unpack("<H", host.frame()[4][:2])[0])
    assert set(codes) <= {0, 12}
    assert codes.count(0) <= 4096
    assert codes[-1] == 12
    host.socket.close()
    await healthy(running)
    assert running.descriptors() < 40


async def test_a_request_without_end_is_refused_in_bounded_memory(running: RunningAgent) -> None:
    host = RawHost(running)
    before = running.status("VmRSS")
    for _ in range(160):
        host.socket.sendall(frame(Frame.OPEN, Op.SPAWN, 1, bytes(65_536), 2))
    host.socket.sendall(frame(Frame.OPEN, Op.SPAWN, 1, b"end"))
    kind, _, flags, _, payload = host.frame()
    assert (kind, flags, payload[:2]) == (Frame.RESULT, 1, u16(10))
    assert running.status("VmRSS") - before < 20_000  # the sanitizer keeps freed blocks for a while
    host.socket.close()
    await healthy(running)


async def test_a_host_that_never_reads(running: RunningAgent) -> None:
    host = RawHost(running)
    before = running.status("VmRSS")
    everything = text("/dev/zero") + u64(0) + u64(2**40)
    for stream in range(1, 60):
        host.socket.sendall(frame(Frame.OPEN, Op.READ, stream, everything))
    host.socket.settimeout(0.3)
    pings = b"".join(frame(Frame.OPEN, Op.PING, stream) for stream in range(60, 100_000))
    with pytest.raises(TimeoutError):  # the agent stops reading as well
        host.socket.sendall(pings)
    ticks = running.cpu_ticks()
    await asyncio.sleep(0.3)
    assert running.cpu_ticks() - ticks <= 2
    assert running.status("VmRSS") - before < 4000
    await healthy(running)
    host.socket.close()


async def test_hello_again_starts_afresh(running: RunningAgent) -> None:
    host = RawHost(running)
    host.socket.sendall(frame(Frame.OPEN, Op.SPAWN, 1, spawn("sleep", "2")))
    assert host.frame()[0] == Frame.RESULT
    host.socket.sendall(HELLO)
    assert host.frame()[0] == Frame.HELLO
    host.socket.sendall(frame(Frame.OPEN, Op.PING, 1))
    assert host.frame()[:4] == (Frame.RESULT, 0, 1, 1)
    host.socket.close()


async def test_a_given_connection_instead_of_a_listener(checked_binary: os.PathLike[str]) -> None:
    ours, theirs = socket.socketpair()
    process = await asyncio.create_subprocess_exec(
        checked_binary, "--connect-fd", str(theirs.fileno()), pass_fds=[theirs.fileno()], env={}
    )
    theirs.close()
    ours.settimeout(10)
    ours.sendall(HELLO + frame(Frame.OPEN, Op.PING, 1))
    data = b""
    while len(data) < 100:
        data += ours.recv(1000)
    assert data[4] == Frame.HELLO
    ours.close()
    await asyncio.sleep(0.1)
    assert process.returncode is None  # the host may be back
    process.terminate()
    assert await process.wait() == 0
