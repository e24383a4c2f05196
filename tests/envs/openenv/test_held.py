"""Sessions that are kept over HTTP, as the official tool clients use them: made, joined, called, ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from typing import Any

from tests.envs.openenv.probes import RESET, UNMAKEABLE, Caller, raw, serving, until


async def test_calls_and_a_socket_share_one_session_whichever_worker_has_room() -> None:
    async with serving("echo", workers=3) as server:
        http = Caller(server)
        first, second = await http.create(), await http.create()
        await until(lambda: server.active_sessions == 2)
        listed = await http.ask("tools/list", session_id=first)
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["echo", "stop"]
        assert "reset first" in (await http.say(first, "early"))["error"]["message"]
        async with raw(server, f"/ws?session_id={first}") as socket, raw(server):
            await socket.ask(RESET)
            assert (await http.say(first, "hi"))["result"]["data"] == "hi"
            assert (await socket.ask({"type": "state"}))["data"]["step_count"] == 1
            assert "reset first" in (await http.say(second, "other"))["error"]["message"]
            async with raw(server, f"/ws?session_id={first}") as third:
                assert (await third.hear())["data"]["code"] == "SESSION_ERROR"
            await until(lambda: server.active_sessions == 3)
        await until(lambda: server.active_sessions == 2)
        assert (await http.say(first, "still"))["result"]["data"] == "still"  # the socket left; the session did not
        for name in (first, second):
            assert (await http.ask("openenv/session/close", session_id=name))["result"]["closed"] is True
        await until(lambda: server.active_sessions == 0)
        for method in ("tools/list", "tools/call", "openenv/session/close"):
            assert "unknown session_id" in (await http.ask(method, session_id=first))["error"]["message"]
        assert "unknown session_id" in (await http.ask("openenv/session/close"))["error"]["message"]


async def test_calls_at_the_same_time_take_turns() -> None:
    async with serving() as server:
        http = Caller(server)
        name = await http.create()
        async with raw(server, f"/ws?session_id={name}") as socket:
            await socket.ask(RESET)
            calls = [http.ask("tools/call", session_id=name, name="do", arguments={"how": f"{n}"}) for n in range(12)]
            answers = await asyncio.gather(*calls)
            assert [answer["result"]["data"] for answer in answers] == [f"{n}" for n in range(12)]
            assert (await socket.ask({"type": "state"}))["data"]["step_count"] == 12


async def test_a_silent_session_is_ended_and_the_next_call_is_told() -> None:
    async with serving("echo", idle_timeout=3) as server:
        http = Caller(server)
        name = await http.create()
        async with raw(server, f"/ws?session_id={name}") as socket:
            await socket.ask(RESET)
            for _ in range(5):  # calls keep it, and what is silent beside them is the socket alone
                await asyncio.sleep(0.8)
                assert (await http.say(name, "x"))["result"]["data"] == "x"
            told = await socket.ask({"type": "state"})
            assert told["data"]["code"] == "SESSION_ERROR"
        await until(lambda: server.active_sessions == 0)
        assert "3 s without a request" in (await http.say(name, "late"))["error"]["message"]


async def test_a_close_while_a_socket_is_in_it_ends_the_episode_for_good() -> None:
    async with serving("echo") as server:
        http = Caller(server)
        name = await http.create()
        async with raw(server, f"/ws?session_id={name}") as socket:
            await socket.ask(RESET)
            assert (await http.ask("openenv/session/close", session_id=name))["result"]["joined"] is True
            assert (await socket.ask(RESET))["data"]["code"] == "SESSION_ERROR"
        await until(lambda: server.active_sessions == 0)


async def test_a_socket_that_leaves_in_mid_step_loses_the_episode_and_not_the_session() -> None:
    async with serving() as server:
        http = Caller(server)
        name = await http.create()
        async with raw(server, f"/ws?session_id={name}") as socket:
            await socket.ask(RESET)
            await socket.send({"type": "step", "data": {"tool": "do", "arguments": {"how": "long"}}})
            await asyncio.sleep(0.1)
            socket.socket.transport.abort()
        call: Mapping[str, Any] = {"name": "do", "arguments": {"how": "x"}}
        assert "reset first" in (await http.ask("tools/call", session_id=name, **call))["error"]["message"]
        async with raw(server, f"/ws?session_id={name}") as socket:
            await socket.ask(RESET)
            assert (await http.ask("tools/call", session_id=name, **call))["result"]["data"] == "x"


async def test_a_full_worker_says_so_and_a_place_that_is_free_is_given() -> None:
    async with serving("echo", max_sessions=2) as server:
        http = Caller(server)
        name = await http.create()
        async with raw(server) as socket:
            await socket.ask(RESET)
            refused = (await http.ask("openenv/session/create"))["error"]
            assert refused["data"] == {"code": "CAPACITY_REACHED", "active_sessions": 2, "max_sessions": 2}
            async with raw(server) as third:
                assert (await third.hear())["data"]["code"] == "CAPACITY_REACHED"
            await http.ask("openenv/session/close", session_id=name)
            await http.create()


async def test_a_socket_in_a_session_takes_no_place_of_its_own() -> None:
    async with serving("echo", max_sessions=2) as server:
        http = Caller(server)
        async with raw(server, f"/ws?session_id={await http.create()}") as first:
            await first.ask(RESET)
            async with raw(server, f"/ws?session_id={await http.create()}") as second:
                await second.ask(RESET)
                assert server.active_sessions == 2
                assert "no room" in (await http.ask("openenv/session/create"))["error"]["message"]


async def test_an_env_that_cannot_be_made_and_a_worker_that_dies() -> None:
    async with serving(UNMAKEABLE) as server:
        refused = (await Caller(server).ask("openenv/session/create"))["error"]
        assert refused["data"] == {"factory_name": UNMAKEABLE}
        assert server.active_sessions == 0
    async with serving("echo", workers=2) as server:
        http = Caller(server)
        name, (holder, _) = await http.create(), server.worker_pids
        os.kill(holder, signal.SIGKILL)
        await until(lambda: len(server.worker_pids) == 2 and holder not in server.worker_pids, 30)
        assert "unknown session_id" in (await http.say(name, "x"))["error"]["message"]
        await http.ask("tools/list", session_id=await http.create())
        await until(lambda: server.active_sessions == 1)
