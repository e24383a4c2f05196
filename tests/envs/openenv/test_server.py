"""The server by the protocol's letters: answers, refusals, seats, workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK

from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.envs.openenv.client import ClientOptions, OpenEnvClient
from sandyard.envs.openenv.failures import SessionLost
from sandyard.errors import ConfigError, HostError
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from tests.envs.openenv.probes import RESET, UNMAKEABLE, Cut, raw, serving, until


async def test_an_episode_of_the_code_env_as_coding_clients_play_it() -> None:
    async with serving("code", "memory") as server, raw(server) as client:
        begun = await client.ask({"type": "reset", "data": {"seed": 3, "episode_id": "e1", "unknown": 1}})
        assert begun["type"] == "observation"
        fields = begun["data"]["observation"]
        assert set(fields) == {"stdout", "stderr", "exit_code", "metadata"}
        assert (begun["data"]["reward"], begun["data"]["done"]) == (None, False)
        ran = await client.ask({"type": "step", "data": {"code": "import sys\nprint(4)\nprint(5, file=sys.stderr)"}})
        observation = ran["data"]["observation"]
        assert (observation["stdout"], observation["stderr"], observation["exit_code"]) == ("4\n", "5\n", 0)
        bad = await client.ask({"type": "step", "data": {"code": "raise SystemExit(9)", "metadata": {}}})
        assert bad["data"]["observation"]["exit_code"] == 9
        state = await client.ask({"type": "state"})
        assert state == {"type": "state", "data": {"episode_id": "e1", "step_count": 2, "done": False}}
        call = {"type": "step", "data": {"tool": "submit_solution", "arguments": {"code": "x = 1"}}}
        over = await client.ask(call)
        assert (over["data"]["done"], over["data"]["reward"]) == (True, None)
        refused = await client.ask(call)
        assert (refused["data"]["code"], "send reset" in refused["data"]["message"]) == ("EXECUTION_ERROR", True)
        assert (await client.ask(RESET))["data"]["done"] is False
        await client.send({"type": "close"})
        with pytest.raises(ConnectionClosedOK):
            await client.socket.recv()


async def test_mcp_as_steps_and_as_messages() -> None:
    async with serving("echo") as server, raw(server) as client:
        listed = await client.ask({"type": "step", "data": {"type": "list_tools"}})  # before any reset
        assert [tool["name"] for tool in listed["data"]["observation"]["tools"]] == ["echo", "stop"]
        await client.ask(RESET)
        call: dict[str, Any] = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "hi"}}
        answer = (await client.ask({"type": "step", "data": call}))["data"]["observation"]
        assert (answer["tool_name"], answer["result"]["data"], answer["error"]) == ("echo", "hi", None)
        wrong = (await client.ask({"type": "step", "data": call | {"arguments": {}}}))["data"]["observation"]
        assert wrong["error"]["error_type"] == "invalid_args"
        plain = await client.ask({"type": "step", "data": {"message": "plain"}})
        assert plain["data"]["observation"]["text"] == "plain"
        params = {"name": "echo", "arguments": {"message": "rpc"}}
        rpc = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}
        told = await client.ask({"type": "mcp", "data": rpc})
        assert (told["type"], told["data"]["id"], told["data"]["result"]["data"]) == ("mcp", 7, "rpc")
        assert (await client.ask({"type": "state"}))["data"]["step_count"] == 4
        unknown = await client.ask({"type": "mcp", "data": rpc | {"method": "prompts/list"}})
        assert unknown["data"]["error"]["code"] == -32601
        async with raw(server, "/mcp") as bare:
            tools = await bare.ask({"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            assert tools["result"]["tools"][0]["inputSchema"]["required"] == ["message"]


async def test_what_is_wrong_is_told_by_code_and_the_session_goes_on() -> None:
    async with serving() as server, raw(server) as client:
        assert await client.code_of("{") == "INVALID_JSON"
        assert await client.code_of("[" * 100_000) == "INVALID_JSON"
        assert await client.code_of(b"\xff") == "INVALID_JSON"
        assert await client.code_of([1]) == "VALIDATION_ERROR"
        assert await client.code_of({"type": "jump"}) == "UNKNOWN_TYPE"
        assert await client.code_of({"type": ["reset"]}) == "UNKNOWN_TYPE"
        assert await client.code_of({"type": "step"}) == "VALIDATION_ERROR"
        assert await client.code_of({"type": "step", "data": {}, "timeout_s": 5}) == "VALIDATION_ERROR"
        assert await client.code_of({"type": "step", "data": {"fly": 1}}) == "VALIDATION_ERROR"
        assert await client.code_of({"type": "step", "data": {"tool": "do", "arguments": []}}) == "VALIDATION_ERROR"
        assert await client.code_of({"type": "reset", "data": {"seed": "x"}}) == "VALIDATION_ERROR"
        before = await client.do("hello")
        assert (before["data"]["code"], "reset first" in before["data"]["message"]) == ("EXECUTION_ERROR", True)
        assert (await client.ask(RESET))["data"]["metadata"]["info"].keys() == {"pid"}
        for how in ("exit", "raise", "die", "full", "nan"):
            assert (await client.do(how))["data"]["code"] == "EXECUTION_ERROR", how
        died = (await client.do("die"))["data"]
        assert (died["boundary"], died["error"]) == ("sandbox", "SandboxDied")
        assert (await client.do("full"))["data"]["retry_after"] == 7
        assert (await client.do("hello"))["data"]["observation"]["text"] == "hello"
        cut = (await client.do("cut"))["data"]
        assert (cut["reward"], cut["done"], cut["metadata"]["truncated"]) == (0.25, True, True)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server, raw(server) as client:
        await client.send(RESET)
        for number in range(100):
            await client.send({"type": "step", "data": {"tool": "do", "arguments": {"how": f"{number}"}}})
            await client.send({"type": "state"})
        assert (await client.hear())["type"] == "observation"
        for number in range(100):
            assert (await client.hear())["data"]["observation"]["text"] == f"{number}"
            assert (await client.hear())["data"]["step_count"] == number + 1


async def test_an_endless_program_ends_its_step_only() -> None:
    async with serving("tests.envs.openenv.probes:QuickCodeEnv") as server, raw(server) as client:
        await client.ask(RESET)
        endless = await client.ask({"type": "step", "data": {"code": "while True: pass"}})
        assert endless["data"]["metadata"]["status"] == "timeout"
        next_one = await client.ask({"type": "step", "data": {"code": "print(1)"}})
        assert next_one["data"]["observation"]["stdout"] == "1\n"


@pytest.mark.parametrize(
    "backend",
    [
        "memory",
        "interpreter",
        pytest.param("process", marks=pytest.mark.root),
        pytest.param("sandbox", marks=[pytest.mark.root, pytest.mark.timeout(240)]),
    ],
)
async def test_what_ends_a_program_ends_its_step_only(
    backend: str, node: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_URL", Connection.to(node).api_url)
    monkeypatch.setenv("E2B_API_KEY", Connection.to(node).api_key or "")
    if backend == "sandbox":
        await build_base(Settings())
    async with serving("code", backend) as server, raw(server) as client, raw(server) as other:
        for one in (client, other):
            assert (await one.ask(RESET))["type"] == "observation"

        async def run(code: str) -> dict[str, Any]:
            answer = await client.ask({"type": "step", "data": {"code": code}})
            assert answer["type"] == "observation", answer
            return dict(answer["data"])

        for code in ("import sys\nsys.exit(3)", "raise SystemExit", "raise KeyboardInterrupt"):
            await run(code)
            assert (await run("print(1 + 1)"))["observation"]["stdout"] == "2\n"
        endless = asyncio.create_task(run("while True:\n    pass"))
        meanwhile = await other.ask({"type": "step", "data": {"code": "print('other')"}})
        assert meanwhile["data"]["observation"]["stdout"] == "other\n"
        assert not endless.done()
        assert (await endless)["metadata"]["status"] == "timeout"
        assert (await run("print(1 + 1)"))["observation"]["stdout"] == "2\n"


async def test_a_step_that_does_not_end_is_given_up_with_its_episode() -> None:
    async with serving(step_timeout=0.3) as server, raw(server) as client:
        await client.ask(RESET)
        late = await client.do("long")
        assert (late["data"]["code"], "not done after 0.3 s" in late["data"]["message"]) == ("EXECUTION_ERROR", True)
        assert "send reset" in (await client.do("hello"))["data"]["message"]
        await client.ask(RESET)
        assert (await client.do("hello"))["data"]["observation"]["text"] == "hello"


async def test_no_session_is_refused_while_any_worker_has_room() -> None:
    async with serving(workers=2, max_sessions=2) as server:
        async with raw(server), raw(server), raw(server), raw(server) as last:
            assert (await last.ask(RESET))["type"] == "observation"
            async with raw(server) as fifth:
                refused = await fifth.hear()
                assert refused["data"]["code"] == "CAPACITY_REACHED"
                assert (refused["data"]["active_sessions"], refused["data"]["max_sessions"]) == (4, 4)
                with pytest.raises(ConnectionClosedOK):
                    await fifth.hear()
            assert server.active_sessions == 4
            async with httpx.AsyncClient() as web:  # questions need no seat
                assert (await web.get(f"{server.url}/health")).json() == {"status": "healthy"}
        await until(lambda: server.active_sessions == 0)
        async with raw(server) as again:
            assert (await again.ask(RESET))["type"] == "observation"


async def test_a_silent_session_is_ended_and_says_so_on_the_next_call() -> None:
    async with serving(idle_timeout=0.3, max_sessions=1) as server, raw(server) as client:
        await client.ask(RESET)
        await until(lambda: server.active_sessions == 0)
        async with raw(server) as next_one:  # the seat is free although the first socket is open
            assert (await next_one.ask(RESET))["type"] == "observation"
        told = await client.do("hello")
        assert (told["data"]["code"], "0.3 s without a request" in told["data"]["message"]) == ("SESSION_ERROR", True)
        with pytest.raises(ConnectionClosed):
            await client.hear()


async def test_half_open_sockets_are_found_by_pings() -> None:
    async with serving(ping_interval=0.3) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        writer.write(f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n".encode())
        assert b"101" in await reader.readline()
        await until(lambda: server.active_sessions == 1)
        await until(lambda: server.active_sessions == 0)  # it answers no ping
        writer.close()


async def test_a_link_that_is_cut_frees_its_seat_and_a_whole_one_does_not() -> None:
    options = ClientOptions(step_timeout=0.5)
    async with (
        serving(ping_interval=0.3) as server,
        Cut(server.url).open() as relay,
        OpenEnvClient(relay.url, options) as env,
    ):
        await env.reset()
        await asyncio.sleep(1.5)  # five pings, each answered
        assert server.active_sessions == 1
        relay.cut()
        await until(lambda: server.active_sessions == 0)
        with pytest.raises(SessionLost, match=r"not answered within 0\.5 s"):
            await env.step("do", {"how": "hello"})


async def test_a_client_that_leaves_during_a_step_frees_its_seat() -> None:
    async with serving() as server:
        async with raw(server) as client:
            await client.ask(RESET)
            await client.send({"type": "step", "data": {"tool": "do", "arguments": {"how": "long"}}})
            await asyncio.sleep(0.1)
            client.socket.transport.abort()
        await until(lambda: server.active_sessions == 0, 5)


async def test_hellos_that_are_none_take_no_seat() -> None:
    async with serving(max_sessions=1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        for hello in (b"GET /ws HTTP/1.1\r\nHost: x\r\n\r\n", b"nonsense\r\n\r\n", b""):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(hello)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 15)
            writer.close()
        await until(lambda: server.active_sessions == 0)
        async with raw(server) as client:
            assert (await client.ask(RESET))["type"] == "observation"


async def test_a_killed_worker_costs_its_sessions_only_and_is_replaced() -> None:
    async with serving(workers=2, drain=1.0) as server, raw(server) as first, raw(server) as second:
        pids = [(await client.ask(RESET))["data"]["metadata"]["info"]["pid"] for client in (first, second)]
        assert sorted(pids) == sorted(server.worker_pids)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ConnectionClosedError):
            await first.hear()
        assert (await second.do("hello"))["data"]["observation"]["text"] == "hello"
        await until(lambda: len(server.worker_pids) == 2 and pids[0] not in server.worker_pids, 30)
        async with raw(server) as third:
            assert (await third.ask(RESET))["data"]["metadata"]["info"]["pid"] not in pids


async def test_a_worker_that_an_env_ends_is_replaced_too() -> None:
    async with serving() as server, raw(server) as client:
        await client.ask(RESET)
        (old,) = server.worker_pids
        await client.send({"type": "step", "data": {"tool": "do", "arguments": {"how": "kill"}}})
        with pytest.raises(ConnectionClosedError):
            await client.hear()
        await until(lambda: len(server.worker_pids) == 1 and server.worker_pids != [old], 30)


async def test_a_stop_answers_what_was_asked_and_ends_sessions() -> None:
    server = serving(drain=5.0)
    await server.__aenter__()
    (pid,) = server.worker_pids
    async with raw(server) as client:
        await client.ask(RESET)
        await client.send({"type": "step", "data": {"tool": "do", "arguments": {"how": "hello"}}})
        await asyncio.sleep(0.02)
        stopping = asyncio.create_task(server.stop())
        assert (await client.hear())["data"]["observation"]["text"] == "hello"
        with pytest.raises(ConnectionClosed) as closed:
            await client.hear()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        await stopping
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_start_that_cannot_be_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="there is no env 'nope'"):
        await serving("nope", workers=2).__aenter__()
    with pytest.raises(ConfigError, match="no_such_module"):
        await serving("no_such_module:Env").__aenter__()
    async with serving("echo") as server:
        with pytest.raises(HostError, match="cannot listen"):
            await serving("echo", port=int(server.url.rsplit(":", 1)[1])).__aenter__()


async def test_an_env_that_cannot_be_made_is_told_to_its_client() -> None:
    async with serving(UNMAKEABLE) as server, raw(server) as client:
        told = await client.hear()
        assert (told["data"]["code"], told["data"]["factory_name"]) == ("FACTORY_ERROR", UNMAKEABLE)
        assert "no more of these" in told["data"]["message"]
        await until(lambda: server.active_sessions == 0)


async def test_http_tells_what_the_env_is_and_steps_without_a_session() -> None:
    async with serving("code", "memory") as server, httpx.AsyncClient(base_url=server.url) as web:
        metadata = (await web.get("/metadata")).json()
        assert (metadata["name"], "run_python" in metadata["description"]) == ("code", True)
        schema = (await web.get("/schema")).json()
        assert schema["action"]["properties"]["tool"]["enum"] == ["run_python", "submit_solution"]
        assert {"action", "observation", "state"} <= set(schema)
        assert (await web.get("/state")).json() == {"episode_id": None, "step_count": 0, "done": False}
        reset = (await web.post("/reset", json={"seed": 1})).json()
        assert (reset["done"], reset["reward"]) == (False, None)
        step = await web.post("/step", json={"action": {"code": "print(6)"}})
        assert step.json()["observation"]["stdout"] == "6\n"
        assert (await web.post("/step", json={"action": {"fly": 1}})).status_code == 422
        assert (await web.post("/step", json={})).status_code == 422
        assert (await web.post("/step", content="{")).status_code == 422
        late = await web.post("/step", json={"action": {"code": "while True: pass"}, "timeout_s": 0.5})
        assert late.status_code == 504
        assert (await web.post("/step", content=b"x" * (5 << 20))).status_code == 413
        assert (await web.get("/step")).status_code == 405
        assert (await web.get("/nothing")).status_code == 404
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        told = await web.post("/mcp", json=rpc | {"params": {"name": "run_python", "arguments": {"code": "print(8)"}}})
        assert told.json()["result"]["data"] == "8"


@pytest.mark.parametrize("name", ["workers", "max_sessions", "idle_timeout", "step_timeout"])
def test_options_must_make_sense(name: str) -> None:
    wrong: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=name):
        serving(**wrong)
