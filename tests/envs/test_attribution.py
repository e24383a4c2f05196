"""Whatever a server does, the failure lands on its boundary: a fake server that misbehaves in every way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from sandyard.connection import Connection
from sandyard.envs import attribution, lease, remote
from sandyard.envs.base import StepStatus
from sandyard.envs.lease import SandboxLease
from sandyard.envs.remote import RemoteSandbox
from sandyard.envs.sandbox import SandboxEnv
from sandyard.errors import (
    AgentLinkError,
    BadRequest,
    CapacityError,
    CreateFailed,
    DeathReason,
    GuestError,
    NotFound,
    SandboxDied,
    SandboxError,
    SandyardError,
    Unauthorized,
    VerifierError,
)
from sandyard.tasks.base import Task
from sandyard.verify.code import CodeVerifier, SandboxLauncher

MADE = {"templateID": "base", "sandboxID": "s1", "clientID": "c", "envdVersion": "0.4.0", "domain": None}
Answer = int | str | dict[str, Any]  # a status, a way to misbehave, or a good body


def frame(flag: bytes, body: bytes) -> bytes:
    """One message of a Connect stream."""
    return flag + len(body).to_bytes(4) + body


STARTED = frame(b"\0", b'{"event":{"start":{"pid":1}}}')
DEADLINE = frame(b"\2", b'{"error":{"code":"deadline_exceeded","message":"the command ran too long"}}')


def operation(method: str, path: str) -> str:
    match method, path.split("?")[0]:
        case "POST", "/v2/sandboxes" | "/sandboxes":
            return "create"
        case "GET", "/sandboxes/s1":
            return "ask"
        case "DELETE", "/sandboxes/s1":
            return "kill"
        case "POST", "/process.Process/Start":
            return "start"
        case "POST", "/files":
            return "files"
        case "POST", "/leases":
            return "lease"
    return path


@dataclass
class FakeServer:
    """Answers by `answers[operation]`: a status with Sandyard's error body, JSON, or "reset", "hang",
    "garbage", "list"; of a stream that starts: "cut" (it breaks), "stall" (it says no more), "deadline"
    (the server ended the command after 0.6 s)."""

    answers: dict[str, Answer] = field(default_factory=dict)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went or was thrown out, or the test is over
        finally:
            writer.close()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, _ = head.split(" ", 2)
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if headers.get("transfer-encoding") == "chunked":
            while (size := int(await reader.readline(), 16)) > 0:
                await reader.readexactly(size + 2)
            await reader.readline()
        await reader.readexactly(int(headers.get("content-length", 0)))
        answer = self.answers.get(operation(method, path), 404)
        kind = headers.get("content-type", "application/json")
        if answer in ("cut", "stall", "deadline"):
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            writer.write(b"%x\r\n%b\r\n" % (len(STARTED), STARTED))
            await writer.drain()
            await asyncio.sleep({"cut": 0.1, "stall": 30, "deadline": 0.6}[str(answer)])
            if answer == "deadline":
                writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DEADLINE), DEADLINE))
                await writer.drain()
                return
        if answer == "hang":
            await asyncio.sleep(30)
        if answer in ("reset", "cut", "hang", "stall"):
            writer.transport.abort()
            raise ConnectionResetError
        status, body = _body(answer)
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n".encode())
        writer.write(f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()


def _body(answer: Answer) -> tuple[int, bytes]:
    if isinstance(answer, int):
        return answer, json.dumps({"code": answer, "message": f"answer {answer}"}).encode()
    if isinstance(answer, dict):
        return 201, json.dumps(answer).encode()
    return {"garbage": (201, b"<html>proxy</html>"), "list": (201, b"[1]"), "list500": (500, b"[1]")}[answer]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer({"create": MADE, "ask": 200, "kill": 204})
    listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield fake
    listening.close()


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_CONNECTION_RETRIES", "0")
    for module, name in (
        (remote, "_CREATE_TIMEOUT"), (remote, "_KILL_TIMEOUT"), (remote, "_FILE_TIMEOUT"), (remote, "_GRACE"),
        (attribution, "_ASK_TIMEOUT"), (lease, "_REQUEST_TIMEOUT"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 1.0)


def at(server: FakeServer) -> Connection:
    return Connection(server.url, "key", server.url)


async def make(server: FakeServer) -> RemoteSandbox:
    return await RemoteSandbox.create(at(server))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (400, BadRequest), (401, Unauthorized), (403, Unauthorized), (404, NotFound), (409, BadRequest),
        (422, BadRequest), (429, CapacityError), (500, CreateFailed), (502, CreateFailed), (503, CapacityError),
        (504, CreateFailed), ("reset", CreateFailed), ("hang", CreateFailed), ("garbage", CreateFailed),
        ("list", CreateFailed), ("list500", CreateFailed), ({"templateID": "base"}, CreateFailed),
    ],
)  # fmt: skip
async def test_a_create_that_fails(server: FakeServer, answer: Answer, expected: type[SandyardError]) -> None:
    server.answers["create"] = answer
    with pytest.raises(expected) as caught:
        await make(server)
    assert type(caught.value) is expected
    assert "\n" not in str(caught.value)


async def test_a_create_where_nobody_listens() -> None:
    with pytest.raises(CreateFailed):
        await RemoteSandbox.create(Connection("http://127.0.0.1:9", "key", "http://127.0.0.1:9"))


@pytest.mark.parametrize("call", ["start", "files"])
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (401, AgentLinkError), (404, None), (429, CapacityError), (500, AgentLinkError), (502, AgentLinkError),
        (503, AgentLinkError), (504, AgentLinkError), ("reset", AgentLinkError), ("hang", AgentLinkError),
        ("garbage", AgentLinkError),
    ],
)  # fmt: skip
async def test_a_call_that_a_living_sandbox_does_not_answer(
    server: FakeServer, call: str, answer: Answer, expected: type[SandyardError] | None
) -> None:
    server.answers[call] = answer
    sandbox = await make(server)
    if expected is None:  # a path that is not there is the caller's, a process service that is not there is not
        expected = GuestError if call == "files" else AgentLinkError
    with pytest.raises(expected) as caught:
        await (sandbox.run("true", timeout=0.5) if call == "start" else sandbox.write_file("/a", "b"))
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (200, AgentLinkError), (401, Unauthorized), (403, Unauthorized), (404, SandboxDied), (429, AgentLinkError),
        (500, SandboxDied), (503, SandboxDied), ("reset", SandboxDied), ("hang", SandboxDied),
    ],
)  # fmt: skip
async def test_a_stream_that_breaks_is_explained_by_asking(
    server: FakeServer, ask: Answer, expected: type[SandyardError]
) -> None:
    server.answers |= {"start": "cut", "ask": ask}
    sandbox = await make(server)
    with pytest.raises(expected) as caught:
        await sandbox.run("sleep 9", timeout=9)
    assert type(caught.value) is expected
    if isinstance(caught.value, SandboxDied):
        assert caught.value.reason is DeathReason.HOST


async def test_a_deadline_is_the_commands_only_while_the_server_answers(server: FakeServer) -> None:
    server.answers["start"] = "deadline"
    sandbox = await make(server)
    assert (await sandbox.run("sleep 9", timeout=0.5)).timed_out
    server.answers["ask"] = "hang"
    with pytest.raises(SandboxDied, match="does not answer"):
        await sandbox.run("sleep 9", timeout=0.5)
    server.answers |= {"ask": 200, "start": "stall"}  # a server that lives and does not enforce
    with pytest.raises(AgentLinkError):
        await sandbox.run("sleep 9", timeout=0.5)


async def test_a_close_never_raises(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    for answer in (401, 500, "reset", "hang", "garbage"):
        server.answers["kill"] = answer
        await (await make(server)).close()
    assert "was not killed" in caplog.text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (400, BadRequest), (401, Unauthorized), (404, NotFound), (429, CapacityError), (500, SandboxError),
        (502, SandboxError), (503, CapacityError), (504, SandboxError), ("reset", SandboxError),
        ("hang", SandboxError), ("garbage", SandboxError), ("list", SandboxError), ({}, SandboxError),
    ],
)  # fmt: skip
async def test_a_lease_that_is_not_given(server: FakeServer, answer: Answer, expected: type[SandyardError]) -> None:
    server.answers["lease"] = answer
    with pytest.raises(expected) as caught:
        async with SandboxLease(at(server)):
            pass
    assert type(caught.value) is expected


async def test_a_renewal_goes_on_whatever_was_answered(server: FakeServer) -> None:
    server.answers |= {"lease": {"leaseID": "l1"}, "/leases/l1/renew": "garbage"}
    async with SandboxLease(at(server), ttl=0.3) as held:
        await asyncio.sleep(0.3)
        assert not held.lost
        server.answers["/leases/l1/renew"] = 404
        await asyncio.sleep(0.3)
        assert held.lost


async def test_an_env_never_turns_it_into_an_observation(server: FakeServer) -> None:
    env = SandboxEnv(api_url=server.url, api_key="key", command_timeout=0.5)
    await env.reset()
    for answer in (500, "reset", "garbage", "cut"):
        server.answers["start"] = answer
        with pytest.raises(AgentLinkError):
            await env.step("run_command", {"command": "true"})
    server.answers["start"] = "deadline"
    assert (await env.step("run_command", {"command": "sleep 9"})).status is StepStatus.TIMEOUT
    await env.close()


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ({"start": 500}, SandboxError), ({"start": "cut"}, SandboxError), ({"start": 400}, VerifierError),
        ({"create": 500}, CreateFailed), ({"create": 401}, Unauthorized), ({"start": "cut", "ask": 404}, SandboxDied),
    ],
)  # fmt: skip
async def test_a_verifier_gives_no_verdict_that_it_did_not_see(
    server: FakeServer, operations: dict[str, Answer], expected: type[SandyardError]
) -> None:
    server.answers |= operations
    verifier = CodeVerifier(SandboxLauncher(at(server)))
    with pytest.raises(expected):
        await verifier.verify(Task("t", "p", tests=("assert f() == 1",)), "def f(): return 1")
