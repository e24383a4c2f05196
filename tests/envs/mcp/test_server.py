"""`sandyard mcp serve` over real sandboxes, driven by the official client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest

from sandyard.connection import Connection
from sandyard.envs.base import StepStatus
from sandyard.envs.mcp.client import McpLost, mcp_tools
from sandyard.envs.tools import ToolManager

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("base_template")]
SERVE = [sys.executable, "-m", "sandyard", "mcp", "serve"]


def _settings(connection: Connection) -> dict[str, str]:
    return {"E2B_API_URL": connection.api_url, "E2B_API_KEY": connection.api_key or ""}


@asynccontextmanager
async def _http(connection: Connection, **extra: str) -> AsyncIterator[str]:
    environ = {**os.environ, **_settings(connection), **extra}
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--transport", "http", "--port", "0", env=environ, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), 60)).decode()
        found = re.search(r"http://\S+", line)
        assert found, line + (await process.stderr.read()).decode()
        yield found.group()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, errors.decode()


async def _running(connection: Connection) -> int:
    async with httpx.AsyncClient(headers={"X-API-Key": connection.api_key or ""}) as client:
        answer = await client.get(f"{connection.api_url}/v2/sandboxes")
        return len([item for item in answer.json() if item["metadata"].get("for") == "mcp"])


async def _exercise(manager: ToolManager) -> None:
    assert sorted(manager.names()) == ["list_files", "read_file", "run_command", "run_python", "write_file"]
    call = manager.call
    assert "Wrote 3" in (await call("write_file", {"path": "a/b.txt", "content": "abc"})).observation
    assert (await call("read_file", {"path": "a/b.txt"})).observation == "abc"
    assert "b.txt" in (await call("list_files", {"path": "a"})).observation
    assert (await call("run_python", {"code": "print(open('a/b.txt').read() * 2)"})).observation == "abcabc"
    failed = await call("run_command", {"command": "echo out; exit 3"})
    assert (failed.status, failed.observation) == (StepStatus.TASK_FAILED, "out\n[exit code 3]")
    wrong = await call("run_command", {"command": 3})
    assert wrong.status is StepStatus.INVALID_CALL


async def test_stdio(connection: Connection) -> None:
    async with mcp_tools(SERVE, env=_settings(connection)) as tools:
        assert await _running(connection) == 0  # nobody called yet
        await _exercise(ToolManager(tools))
        assert await _running(connection) == 1
    assert await _running(connection) == 0


async def test_stdio_ends_with_a_signal_and_takes_its_sandbox_along(connection: Connection) -> None:
    process = await asyncio.create_subprocess_exec(
        *SERVE,
        env={**os.environ, **_settings(connection)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    async def ask(method: str, params: Mapping[str, object], number: int | None) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        process.stdin.write(json.dumps(message if number is None else {**message, "id": number}).encode() + b"\n")
        if number is not None:
            assert json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["id"] == number

    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    await ask("initialize", hello, 1)
    await ask("notifications/initialized", {}, None)
    await ask("tools/call", {"name": "run_command", "arguments": {"command": "true"}}, 2)
    assert await _running(connection) == 1
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    assert await _running(connection) == 0


async def test_http(connection: Connection) -> None:
    async with _http(connection) as url:
        async with mcp_tools(url) as first, mcp_tools(url) as second:
            await _exercise(ToolManager(first))
            assert (await ToolManager(second).call("read_file", {"path": "a/b.txt"})).observation == "abc"
        assert await _running(connection) == 1
    assert await _running(connection) == 0


@pytest.mark.parametrize("header", [{"Origin": "http://evil.example"}, {"Host": "evil.example"}])
async def test_a_page_of_another_origin_is_refused(connection: Connection, header: Mapping[str, str]) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    accept = {"Accept": "application/json, text/event-stream"}
    async with _http(connection) as url, httpx.AsyncClient() as client:
        answer = await client.post(url, json=body, headers={**accept, **header})
        assert answer.status_code in (403, 421), answer.text


async def test_a_token(connection: Connection) -> None:
    async with _http(connection, SANDYARD_MCP_TOKEN="secret") as url:
        with pytest.raises(McpLost, match="MCP server"):
            async with mcp_tools(url):
                pass
        async with httpx.AsyncClient() as client:
            for header in ({}, {"Authorization": "Bearer wrong"}):
                assert (await client.post(url, json={}, headers=header)).status_code == 401
        async with mcp_tools(url, headers={"Authorization": "Bearer secret"}) as tools:
            assert len(tools) == 5


async def test_a_dead_sandbox_is_said_and_not_replaced_in_silence(connection: Connection) -> None:
    async with mcp_tools(SERVE, env=_settings(connection)) as tools:
        manager = ToolManager(tools)
        await manager.call("write_file", {"path": "kept", "content": "x"})
        async with httpx.AsyncClient(headers={"X-API-Key": connection.api_key or ""}) as client:
            found = (await client.get(f"{connection.api_url}/v2/sandboxes")).json()
            for item in found:
                await client.delete(f"{connection.api_url}/sandboxes/{item['sandboxID']}")
        answer = await manager.call("read_file", {"path": "kept"})
        assert answer.status is StepStatus.TASK_FAILED
        assert "gone with its files" in answer.observation
        assert "No such file" in (await manager.call("read_file", {"path": "kept"})).observation


async def test_a_public_address_needs_a_token() -> None:
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--transport", "http", "--host", "0.0.0.0", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert "SANDYARD_MCP_TOKEN" in errors.decode()
