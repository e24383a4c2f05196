"""The shell env: what hangs, floods or stays behind elsewhere, and the same env served over OpenEnv."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from sandyard.connection import Connection
from sandyard.envs.base import StepStatus
from sandyard.envs.openenv.client import OpenEnvClient
from sandyard.envs.openenv.failures import ServerFault
from sandyard.envs.sandbox import SandboxEnv
from tests.envs.openenv.probes import serving

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("base_template")]


@pytest.fixture
async def env(connection: Connection) -> AsyncIterator[SandboxEnv]:
    async with SandboxEnv(api_url=connection.api_url, api_key=connection.api_key, command_timeout=20) as env:
        await env.reset()
        yield env


async def say(env: SandboxEnv | OpenEnvClient, command: str) -> str:
    return (await env.step("run_command", {"command": command})).observation


@pytest.mark.parametrize(
    ("command", "said"), [("cat", "(no output)"), ("read line || echo ended", "ended"), ("wc -c", "0")]
)
async def test_a_command_that_reads_input_finds_its_end(env: SandboxEnv, command: str, said: str) -> None:
    assert await say(env, command) == said


async def test_a_lot_on_both_streams_does_not_stop_it(env: SandboxEnv) -> None:
    once = "head -c 100000 /dev/zero | tr '\\0'"
    result = await env.run(f"for i in 1 2 3 4 5 6; do {once} o; {once} e >&2; done")
    assert (len(result.stdout), len(result.stderr), result.exit_code) == (600_000, 600_000, 0)


async def test_an_observation_is_never_cut_in_a_character(env: SandboxEnv) -> None:
    result = await env.step("run_command", {"command": "python3 -c \"print('é𝄞漢' * 40000)\""})
    assert len(result.observation) <= env.observation_limit
    assert "�" not in result.observation
    assert "characters" in result.observation


async def test_a_command_that_is_stopped_leaves_nothing_running(env: SandboxEnv) -> None:
    count = "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx sleep; true"
    late = await env.run("sleep 971 & (sleep 971 & sleep 971) & sleep 971", timeout=1)
    assert (late.exit_code, late.timed_out) == (None, True)
    assert await say(env, count) == "0"
    assert await say(env, f"sleep 971 & {count}; kill %1") == "1"  # the count sees one
    assert await say(env, "echo usable") == "usable"


async def test_it_is_served_over_openenv(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", connection.api_url)
    monkeypatch.setenv("E2B_API_KEY", connection.api_key or "")
    async with (
        serving("shell", workers=2) as server,
        OpenEnvClient(server.url) as env,
        OpenEnvClient(server.url) as two,
    ):
        assert [tool.name for tool in env.tools()] == ["run_command", "read_file", "write_file"]
        for one, word in ((env, "first"), (two, "second")):
            await one.reset()
            await one.step("write_file", {"path": "mine", "content": word})
        assert (await env.step("read_file", {"path": "mine"})).observation == "first"
        failed = await two.step("run_command", {"command": "cat mine; exit 4"})
        assert (failed.status, failed.observation) == (StepStatus.TASK_FAILED, "second\n[exit code 4]")
        async with httpx.AsyncClient(headers={"X-API-Key": connection.api_key or ""}) as web:
            for box in (await web.get(f"{connection.api_url}/v2/sandboxes")).json():
                await web.delete(f"{connection.api_url}/sandboxes/{box['sandboxID']}")
        with pytest.raises(ServerFault, match="died: killed") as lost:
            await env.step("run_command", {"command": "true"})
        assert lost.value.boundary == "sandbox"
        await env.reset()
        assert "No such file" in await say(env, "cat mine")
