"""Tools of MCP servers in real processes, honest and hostile."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandyard.envs.base import StepStatus
from sandyard.envs.mcp.client import McpConnection, McpLost, mcp_tools
from sandyard.envs.tools import ToolManager
from sandyard.errors import BadRequest

STUB = Path(__file__).with_name("stub.py")


def command(kind: str) -> list[str]:
    return [sys.executable, str(STUB), kind]


@pytest.fixture
async def manager() -> AsyncIterator[ToolManager]:
    async with mcp_tools(command("plain"), timeout=40.0, observation_limit=500) as tools:
        yield ToolManager(tools)


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


async def test_a_call(manager: ToolManager) -> None:
    result = await manager.call("echo", {"text": "ab", "times": 2})
    assert (result.observation, result.status, result.reward) == ("abab", StepStatus.OK, None)
    assert "echo" in manager.names()


@pytest.mark.parametrize("arguments", [{}, {"text": 1}, {"text": "a", "times": 0}, {"text": "a", "more": 1}])
async def test_arguments_are_checked_before_the_server_sees_them(
    manager: ToolManager, arguments: dict[str, object]
) -> None:
    result = await manager.call("echo", arguments)
    assert result.status is StepStatus.INVALID_CALL
    assert "do not fit" in result.observation
    assert (await manager.call("count", {"text": ""})).observation == "1"


async def test_a_tool_of_its_own_error_is_the_policys(manager: ToolManager) -> None:
    result = await manager.call("fail", {"text": ""})
    assert (result.status, result.observation) == (StepStatus.TASK_FAILED, "no such thing")


async def test_a_call_that_takes_too_long_ends_and_the_next_one_is_answered() -> None:
    async with mcp_tools(command("plain"), timeout=4.0) as tools:
        manager = ToolManager(tools)
        result = await manager.call("hang", {"text": ""})
        assert result.status is StepStatus.TIMEOUT
        assert "ran longer than 4 s" in result.observation
        assert (await manager.call("echo", {"text": "next"})).observation == "next"


async def test_a_long_answer_is_cut_and_says_so(manager: ToolManager) -> None:
    result = await manager.call("big", {"text": ""})
    assert len(result.observation) <= 500
    assert "5000000 characters" in result.observation


async def test_what_is_no_text_is_named(manager: ToolManager) -> None:
    assert (await manager.call("picture", {"text": ""})).observation == "[image image/png, 3 bytes]"


async def test_calls_overlap(manager: ToolManager) -> None:
    results = await asyncio.gather(*(manager.call("echo", {"text": str(n)}) for n in range(20)))
    assert [result.observation for result in results] == [str(n) for n in range(20)]


async def test_a_server_that_dies_in_mid_call_is_nobodys_action_and_stays_lost(manager: ToolManager) -> None:
    for name in ("die", "echo", "count"):  # no new process answers as if nothing had happened
        with pytest.raises(McpLost, match="MCP server"):
            await asyncio.wait_for(manager.call(name, {"text": ""}), 20)


async def test_a_fault_of_the_server_is_not_the_policys(manager: ToolManager) -> None:
    with pytest.raises(McpLost, match="vanish"):
        await manager.call("vanish", {"text": ""})


async def test_a_server_that_changes_its_tools_changes_nothing_of_the_episode() -> None:
    """What a policy was shown stays so; a call that the server takes no more is told, and is nobody's death."""
    async with mcp_tools(command("changing"), timeout=40.0) as tools:
        manager = ToolManager(tools)
        shown = manager.tool_infos()
        for _ in range(2):
            refused = await manager.call("echo", {"text": "x"})
            assert (refused.status, "wants a number" in refused.observation) == (StepStatus.INVALID_CALL, True)
        assert "number" in (await manager.call("echo", {"text": "x", "number": 1})).observation  # by the old schema
        assert "no tool fail" in (await manager.call("fail", {"text": "x"})).observation
        assert "There is no tool" in (await manager.call("new", {})).observation
        assert manager.tool_infos() == shown


async def test_only_the_tools_that_are_asked_for() -> None:
    async with mcp_tools(command("plain"), include=["echo"]) as tools:
        assert [tool.spec.name for tool in tools] == ["echo"]
    with pytest.raises(BadRequest, match="has no tool ecko; it has: echo"):
        async with mcp_tools(command("plain"), include=["ecko"]):
            pass


async def test_a_schema_that_cannot_be_used_is_refused_at_once() -> None:
    with pytest.raises(BadRequest, match="echo"):
        async with mcp_tools(command("bad-schema")):
            pass


async def test_an_endless_list_ends() -> None:
    with pytest.raises(McpLost, match="pages"):
        async with mcp_tools(command("endless")):
            pass


@pytest.mark.parametrize("kind", ["silent", "garbage"])
async def test_a_server_that_does_not_answer_is_given_up(kind: str) -> None:
    before, started = _children(), time.monotonic()
    with pytest.raises(McpLost, match="did not answer within 1 s"):
        async with mcp_tools(command(kind), connect_timeout=1.0):
            pass
    assert time.monotonic() - started < 15
    assert _children() == before


@pytest.mark.parametrize(
    ("server", "why"), [(["/nonexistent/server"], "No such file"), ("http://127.0.0.1:9/mcp", "MCP server http")]
)
async def test_a_server_that_is_not_there(server: str | list[str], why: str) -> None:
    with pytest.raises(McpLost, match=why):
        async with mcp_tools(server, connect_timeout=10.0):
            pass


@pytest.mark.parametrize("server", ["", [], "http://127.0.0.1:9/mcp --verbose"])
async def test_a_server_that_cannot_be_one(server: str | list[str]) -> None:
    with pytest.raises(BadRequest, match="MCP server"):
        McpConnection(server)


async def test_processes_and_descriptors_stay_flat() -> None:
    async def once() -> None:
        async with mcp_tools(command("plain")) as tools:
            await ToolManager(tools).call("echo", {"text": "x"})

    await once()
    processes, files = _children(), len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        await once()
    assert _children() == processes
    assert len(os.listdir("/proc/self/fd")) <= files + 1
