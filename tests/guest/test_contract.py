"""What the real agent and its in-memory twin must both do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode, HostError
from sandyard.guest import (
    Agent,
    Channel,
    ExitStatus,
    FileType,
    MemoryAgent,
    ProcessSpec,
    agent_binary,
)
from tests.guest.conftest import RunningAgent, collect


@pytest.fixture(params=["link", "memory"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    if request.param == "memory":
        agent: Agent = MemoryAgent()
    else:
        running: RunningAgent = request.getfixturevalue("running")
        agent = await running.connect()
    yield agent
    await agent.close()


@pytest.fixture
async def root(either: Agent) -> AsyncIterator[str]:
    path = f"/tmp/sandyard-contract-{id(either)}"
    await either.make_dir(path)
    yield path
    await either.remove(path)


async def code_of(awaitable: object) -> GuestErrorCode:
    with pytest.raises(GuestError) as caught:
        await awaitable  # type: ignore[misc]
    return caught.value.code


async def test_commands(either: Agent) -> None:
    process = await either.spawn(ProcessSpec(["/bin/sh", "-c", "echo hello world"]))
    assert await collect(process) == {Channel.STDOUT: b"hello world\n"}
    assert await process.wait() == ExitStatus(code=0)
    assert await (await either.spawn(ProcessSpec(["false"]))).wait() == ExitStatus(code=1)
    assert await code_of(either.spawn(ProcessSpec(["no-such-command"]))) == GuestErrorCode.NOT_FOUND
    assert await code_of(either.spawn(ProcessSpec(["true"], cwd="/no/such"))) == GuestErrorCode.NO_CWD
    assert await code_of(either.spawn(ProcessSpec(["true"], user="no-such"))) == GuestErrorCode.NO_USER


async def test_stdin_and_attach(either: Agent) -> None:
    process = await either.spawn(ProcessSpec(["cat"], stdin=True))
    assert await either.processes() == [process.pid]
    await process.write_stdin(b"abc")
    again = await either.attach(process.pid)
    await again.write_stdin(b"def")
    await again.close_stdin()
    output = await collect(again)
    assert output[Channel.STDOUT].endswith(b"def")
    assert await again.wait() == ExitStatus(code=0)
    assert await either.processes() == []


async def test_signals(either: Agent) -> None:
    process = await either.spawn(ProcessSpec(["sleep", "20"]))
    await process.signal(9)
    assert await process.wait() == ExitStatus(signal=9)
    assert await collect(process) == {}
    assert await code_of(process.signal(9)) == GuestErrorCode.NOT_FOUND


async def test_files(either: Agent, root: str) -> None:
    assert await either.write_file(f"{root}/a/f", b"data", mode=0o600) == 4
    assert b"".join([chunk async for chunk in either.read_file(f"{root}/a/f", 1, 2)]) == b"at"
    info = await either.stat(f"{root}/a/f")
    assert (info.name, info.type, info.size, info.mode, info.owner) == ("f", FileType.FILE, 4, 0o600, "root")
    assert [entry.path for entry in await either.list_dir(root, 2)] == [f"{root}/a", f"{root}/a/f"]
    await either.move(f"{root}/a", f"{root}/b/c")
    assert [entry.name for entry in await either.list_dir(root, 3)] == ["b", "c", "f"]
    await either.remove(f"{root}/b")
    await either.remove(f"{root}/b")
    assert await either.list_dir(root) == []
    assert await code_of(either.stat(f"{root}/b")) == GuestErrorCode.NOT_FOUND
    assert await code_of(either.make_dir(root)) == GuestErrorCode.EXISTS
    assert await code_of(either.write_file(root, b"")) == GuestErrorCode.IS_DIRECTORY
    assert await code_of(anext(either.read_file(root))) == GuestErrorCode.IS_DIRECTORY


async def test_metadata(either: Agent, root: str) -> None:
    await either.write_file(f"{root}/f", b"data", metadata={"a": "b", "c": ""})
    assert (await either.stat(f"{root}/f")).metadata == {"a": "b", "c": ""}
    await either.move(f"{root}/f", f"{root}/g")
    assert [info.metadata for info in await either.list_dir(root)] == [{"a": "b", "c": ""}]
    await either.write_file(f"{root}/g", b"data", metadata={"d": "e"})
    assert (await either.stat(f"{root}/g")).metadata == {"d": "e"}
    await either.write_file(f"{root}/g", b"data")
    assert (await either.stat(f"{root}/g")).metadata == {}
    for wrong, code in (
        ({"": "x"}, GuestErrorCode.INVALID),
        ({"k" * 247: "x"}, GuestErrorCode.TOO_BIG),
        ({"k": "v" * 4087}, GuestErrorCode.TOO_BIG),
    ):
        assert await code_of(either.write_file(f"{root}/h", b"", metadata=wrong)) == code
    assert await code_of(either.stat(f"{root}/h")) == GuestErrorCode.NOT_FOUND


async def test_watches(either: Agent, root: str) -> None:
    watch = await either.watch(root)
    await either.write_file(f"{root}/f", b"x")
    assert [(str(event.type), event.name) for event in watch.pending()] == [
        ("create", "f"),
        ("chmod", "f"),
        ("write", "f"),
    ]
    await either.remove(f"{root}/f")
    assert (await anext(watch)).type == "remove"
    await watch.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_users_and_ports(either: Agent) -> None:
    assert (await either.user("root")).uid == 0
    assert (await either.user("0")).name == "root"
    assert await code_of(either.user("no-such")) == GuestErrorCode.NO_USER
    assert await code_of(either.connect_port(9)) == GuestErrorCode.REFUSED


async def test_after_close_everything_is_a_link_error(either: Agent) -> None:
    await either.identify(seed=b"x" * 16)
    await either.close()
    await either.close()
    for call in (either.hello(), either.stat("/"), either.processes(), either.spawn(ProcessSpec(["true"]))):
        with pytest.raises(AgentLinkError):
            await call


async def test_twin_commands_and_ports() -> None:
    async def shout(spec: ProcessSpec, stdin: bytes) -> tuple[bytes, bytes, int]:
        return stdin.upper(), " ".join(spec.argv).encode(), 3

    agent = MemoryAgent({"shout": shout})
    process = await agent.spawn(ProcessSpec(["bash", "-l", "-c", "shout 'a b'"], stdin=True))
    await process.write_stdin(b"x")
    await process.close_stdin()
    assert await collect(process) == {Channel.STDOUT: b"X", Channel.STDERR: b"shout a b"}
    assert await process.wait() == ExitStatus(code=3)
    agent.ports[80] = bytes.upper
    stream = await agent.connect_port(80)
    await stream.write(b"hi")
    assert await stream.read(1) + await stream.read() == b"HI"


def test_a_package_without_the_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandyard.guest.__file__", "/nowhere/__init__.py")
    with pytest.raises(HostError, match="make setup"):
        agent_binary()
