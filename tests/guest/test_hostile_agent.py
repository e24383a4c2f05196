"""The link against agents that lie: every lie closes it, with an error that names the lie."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest import LinkAgent, ProcessSpec, open_agent
from sandyard.guest.info import ENTRIES_MAX, LIST_BYTES, read_listing
from sandyard.guest.link import Call, Link
from sandyard.guest.wire import HEADER, MAGIC, Frame, Op, Reader, text, texts, u16, u32, u64
from tests.guest.conftest import collect

HELLO = MAGIC + u16(1) + u32(2) + b"id" + u32(1)


def frame(kind: int, channel: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, channel, flags, stream) + payload


GREETING = frame(Frame.HELLO, 0, 0, HELLO)
STARTED = frame(Frame.RESULT, 0, 1, u16(0) + u32(7) + u32(1000))
Serve = Callable[[bytes], Awaitable[LinkAgent]]


@pytest.fixture
async def lying(tmp_path: Path) -> AsyncIterator[Serve]:
    """`await lying(data)`: a link to a peer that greets, waits for one request and then says `data`."""
    agents: list[LinkAgent] = []
    servers: list[asyncio.Server] = []

    async def start(data: bytes) -> LinkAgent:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                writer.write(GREETING)
                await reader.readexactly(HEADER.size + 6)
                await reader.read(65_536)
                writer.write(data)
                while await reader.read(65_536):
                    pass
            except ConnectionError:
                pass
            finally:
                writer.close()

        path = tmp_path / f"{len(agents)}.sock"
        servers.append(await asyncio.start_unix_server(serve, path))
        agents.append(await open_agent(path, 5, call_timeout=0.4))
        return agents[-1]

    yield start
    for agent in agents:
        await agent.close()
    for server in servers:
        server.close()
        await server.wait_closed()


async def use(agent: LinkAgent) -> None:
    process = await agent.spawn(ProcessSpec(["x"], stdin=True))
    await asyncio.sleep(0.05)
    await collect(process)
    await process.wait()
    await agent.hello()


EOFS = frame(Frame.EOF, 1, 1) + frame(Frame.EOF, 2, 1)
LIES = {
    "over 65536": STARTED + struct.pack("<IBBHI", 65_537, Frame.DATA, 1, 0, 1),
    "unknown stream 2": STARTED + frame(Frame.DATA, 1, 2, b"x"),
    "unknown stream 0": STARTED + GREETING,
    "type 0": STARTED + frame(0, 0, 1),
    "type 99": STARTED + frame(99, 0, 1),
    "channel 3": STARTED + frame(Frame.DATA, 3, 1, b"x"),
    "flags 0x8": STARTED + frame(Frame.DATA, 1, 1, b"x", 8),
    "that nobody asked for": STARTED + frame(Frame.DATA, 1, 1, bytes(65_536)) * 3,
    "sent 0 bytes": STARTED + frame(Frame.DATA, 1, 1),
    "sent 3 bytes": STARTED + frame(Frame.DATA, 0, 1, b"abc"),
    "sent 4 bytes": frame(Frame.DATA, 1, 1, b"abcd"),
    "sent 5 bytes": STARTED + frame(Frame.EOF, 1, 1) + frame(Frame.DATA, 1, 1, b"abcde"),
    "type 5, channel 1 out of place": STARTED + frame(Frame.EOF, 1, 1) * 2,
    "answered .* twice": STARTED * 2,
    "type 7, channel 0 out of place": STARTED + frame(Frame.EXIT, 0, 1, b"\0" + u32(0)) * 2,
    "bytes of credit": STARTED + frame(Frame.CREDIT, 0, 1, u32(2**31)),
    "type 4, channel 1 out of place": STARTED + frame(Frame.CREDIT, 1, 1, u32(1)),
    "too short": frame(Frame.RESULT, 0, 1, u16(0)),
    "unknown error code 77": frame(Frame.RESULT, 0, 1, u16(77) + u32(0) + u32(0), 1),
    "without ending it": frame(Frame.RESULT, 0, 1, u16(1) + u32(0) + u32(0)),
    "ended .* with frame type 3": STARTED + frame(Frame.DATA, 1, 1, b"x", 1),
    "too early": STARTED + frame(Frame.RESULT, 0, 1, u16(0), 1),
    "taken over": STARTED + frame(Frame.RESET, 0, 1, b"", 1),
    "type 8, channel 0 out of place": STARTED + frame(Frame.RESET, 0, 1),
    "4294967295 bytes of credit": frame(Frame.RESULT, 0, 1, u16(0) + u32(7) + u32(2**32 - 1)),
    "an end by number 65 on": STARTED + EOFS + frame(Frame.EXIT, 0, 1, b"\1" + u32(65)),
    "an end by number 256 on": STARTED + EOFS + frame(Frame.EXIT, 0, 1, b"\0" + u32(256)),
    "did not answer hello within 0.4 s": STARTED + EOFS + frame(Frame.EXIT, 0, 1, b"\0" + u32(0)),
}


@pytest.mark.parametrize("says", LIES)
async def test_lies(lying: Serve, says: str) -> None:
    agent = await lying(LIES[says])
    with pytest.raises(AgentLinkError, match=says):
        await use(agent)


async def test_a_flood_of_tiny_frames_costs_no_object_each(lying: Serve) -> None:
    end = EOFS + frame(Frame.EXIT, 0, 1, b"\0" + u32(0))
    agent = await lying(STARTED + frame(Frame.DATA, 1, 1, b"x") * 100_000 + end)
    process = await agent.spawn(ProcessSpec(["x"]))
    await process.wait()
    chunks = [data async for _, data in process.output()]
    assert b"".join(chunks) == b"x" * 100_000
    assert len(chunks) == 2


async def test_no_answer_at_all_has_a_deadline(lying: Serve, tmp_path: Path) -> None:
    agent = await lying(b"")
    calls = (
        agent.hello(), agent.spawn(ProcessSpec(["x"])), agent.stat("/"), agent.list_dir("/"),
        agent.write_file("/x", b"x" * 5_000_000), anext(agent.read_file("/x")), agent.watch("/"), agent.connect_port(1),
    )  # fmt: skip
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, AgentLinkError)
        assert "within 0.4 s" in str(result)


def info(name: bytes = b"n", more: int = 0, rest: bytes = b"") -> bytes:
    """An info record of a file."""
    begin = u32(len(name)) + name + u32(2) + b"/n" + b"\0" + u64(1) + u32(0o644) + u32(0) * 2
    return begin + u32(0) * 2 + u64(0) + bytes((more,)) + rest


def listing(data: bytes) -> bytes:
    cut = [data[at : at + 60_000] for at in range(0, len(data), 60_000)]
    frames = b"".join(frame(Frame.DATA, 1, 1, part) for part in cut)
    end = frame(Frame.EOF, 1, 1) + frame(Frame.RESULT, 0, 1, u16(0), 1)
    return frame(Frame.RESULT, 0, 1, u16(0)) + frames + end


async def test_records_are_joined_where_frames_cut_them(lying: Serve) -> None:
    pairs = [u32(1) + b"a", u32(2) + b"\xff\0"]
    agent = await lying(listing((info() + info(b"m" * 255, 4, u32(2) + b"".join(pairs))) * 300))
    entries = await agent.list_dir("/")
    assert [(entry.name, dict(entry.metadata)) for entry in entries[:2]] == [
        ("n", {}),
        ("m" * 255, {"a": "\udcff\0"}),
    ]
    assert len(entries) == 600


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (info(more=3), "goes on with 3"),
        (info(more=8), "goes on with 8"),
        (info(more=4, rest=u32(3)), "metadata of 3 texts"),
        (info(more=4, rest=u32(2**31)), "metadata of"),
        (info()[:-1], "ended within a record"),
        (u32(2**31) + bytes(200_000), "a record of more than 65536 bytes"),
    ],
)
async def test_a_listing_that_lies(lying: Serve, data: bytes, says: str) -> None:
    agent = await lying(listing(data))
    with pytest.raises(AgentLinkError, match=says):
        await agent.list_dir("/")


async def chunks(data: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield data


async def test_a_listing_holds_a_bounded_amount() -> None:
    many = info() * 1000
    entries = await read_listing(chunks(many, ENTRIES_MAX // 1000), "list")
    assert len(entries) == ENTRIES_MAX
    for data, count in ((many, ENTRIES_MAX // 1000 + 1), (info(b"n" * 4000) * 16, LIST_BYTES // 60_000)):
        with pytest.raises(GuestError, match="more than 100000 entries or 32 MiB") as caught:
            await read_listing(chunks(data, count), "list")
        assert caught.value.code == GuestErrorCode.TOO_BIG


@pytest.mark.parametrize(
    "greeting",
    [b"HTTP/1.1 400 Bad Request\r\n", frame(Frame.HELLO, 0, 0, MAGIC + u16(2)), frame(Frame.HELLO, 0, 0, b"SY"),
     frame(Frame.DATA, 1, 1, b"x"), b"", frame(Frame.HELLO, 0, 1, HELLO)],
)  # fmt: skip
async def test_strange_greetings(tmp_path: Path, greeting: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await asyncio.sleep(0.3)
        writer.close()

    async with await asyncio.start_unix_server(serve, tmp_path / "s"):
        with pytest.raises(AgentLinkError):
            await open_agent(tmp_path / "s", 0.2)
        await asyncio.sleep(0.35)


class Sink:
    """A transport that goes nowhere."""

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass


def feed(link: Link, data: bytes, cuts: list[int]) -> None:
    """Give `data` to the link in pieces of the sizes in `cuts`, then the rest."""
    for size in [*cuts, len(data)]:
        while data and size > 0 and not link.error:
            room = link.get_buffer(-1)
            piece = data[: min(size, len(room))]
            room[: len(piece)] = piece
            link.buffer_updated(len(piece))
            data, size = data[len(piece) :], size - len(piece)


def new_link(loop: asyncio.AbstractEventLoop) -> Link:
    link = Link(loop)
    link.connection_made(Sink())  # type: ignore[arg-type]
    return link


@given(answers=st.lists(st.binary(max_size=300), max_size=8), cuts=st.lists(st.integers(1, 200), max_size=20))
def test_frames_arrive_whole_however_they_are_cut(answers: list[bytes], cuts: list[int]) -> None:
    loop = asyncio.new_event_loop()
    try:
        link = new_link(loop)
        calls = [Call("x", loop) for _ in answers]
        for call in calls:
            link.open(Op.PING, b"", call)
        frames = [frame(Frame.RESULT, 0, call.id, u16(0) + data, 1) for call, data in zip(calls, answers, strict=True)]
        feed(link, GREETING + b"".join(frames), cuts)
        assert link.error is None
        for call, data in zip(calls, answers, strict=True):
            assert call.future.result().raw(len(data)) == data
    finally:
        loop.close()


@given(data=st.binary(max_size=2000), cuts=st.lists(st.integers(1, 100), max_size=5), greet=st.booleans())
def test_any_bytes_are_frames_or_an_error(data: bytes, cuts: list[int], greet: bool) -> None:
    loop = asyncio.new_event_loop()
    try:
        link = new_link(loop)
        link.open(Op.PING, b"", Call("x", loop))
        feed(link, (GREETING if greet else b"") + data, cuts)
        assert link.error is None or isinstance(link.error, AgentLinkError)
        link.fail("over")
        for receiver in list(link._streams.values()):
            receiver.on_lost(AgentLinkError("over"))
    finally:
        loop.close()


@given(st.binary(max_size=200))
def test_a_reader_fails_only_with_a_link_error(data: bytes) -> None:
    reader = Reader(data)

    def read_on() -> None:
        while True:
            reader.text()
            reader.u8()
            reader.sent_texts()

    with pytest.raises(AgentLinkError):
        read_on()


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=50)))
def test_texts_come_back_as_they_went(values: list[str]) -> None:
    assert Reader(texts(values)).sent_texts() == values


def test_what_no_system_call_takes_is_refused_here() -> None:
    for bad in ("a\0b", "\ud800"):
        with pytest.raises(GuestError) as caught:
            text(bad)
        assert caught.value.code == GuestErrorCode.INVALID
