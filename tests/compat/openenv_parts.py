"""OpenEnv both ways: released clients against our server, and our client against official servers.

The echo and coding servers of the official repository are driven where `OPENENV_CHECKOUT` names one.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from sandyard.envs.base import StepStatus
from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.client import ClientOptions, OpenEnvClient
from sandyard.envs.openenv.failures import ServerFault
from sandyard.envs.openenv.server import OpenEnvServer, ServerOptions
from sandyard.errors import CapacityError
from sandyard.tasks.base import Task
from tests.compat.outcomes import of_lines
from tests.compat.report import Row
from tests.compat.workshop import PartFailed, Workshop

PART = "openenv"
HERE = Path(__file__).parent
PACKAGES = ("openenv==0.10.0", "openenv-core==0.3.0")  # of one import name: a venv each
_START_SECONDS = 120
Check = Callable[[str], Awaitable[None]]


def run(shop: Workshop) -> list[Row]:
    rows: list[Row] = []
    for package in PACKAGES:
        python = shop.venv(package.replace("==", "-"), [package, "smolagents==1.26.*"])
        rows.append(asyncio.run(_client_against_ours(shop, package, python)))
        rows.append(asyncio.run(_ours_against_servers(package, python)))
    return rows


async def _client_against_ours(shop: Workshop, package: str, python: Path) -> Row:
    def options(spec: EnvSpec) -> ServerOptions:
        return ServerOptions(spec, port=0, workers=2, max_sessions=8)

    async with (
        OpenEnvServer(options(EnvSpec("code", "memory"))) as code,
        OpenEnvServer(options(EnvSpec("echo"))) as echo,
    ):
        env = {"OPENENV_CODE_URL": code.url, "OPENENV_ECHO_URL": echo.url}
        name = f"openenv-client-{package.replace('==', '-')}"
        script = HERE / "openenv_client.py"
        await asyncio.to_thread(shop.run, name, [python, script], env=env, limit=300.0, may_fail=True)
    passed, failed = of_lines(shop.logs / f"{name}.log")
    total = len(passed) + len(failed)
    if not total:
        raise PartFailed(f"{name}: it said nothing; see {shop.logs / f'{name}.log'}")
    return Row(PART, f"{package} drives our server", len(passed), total, total, left=failed)


async def _ours_against_servers(package: str, python: Path) -> Row:
    checks: list[tuple[str, Check]] = [("", check) for check in (plain_fields, errors_and_capacity)]
    checkout = os.environ.get("OPENENV_CHECKOUT")
    if checkout:
        checks += [("echo_env", official_echo), ("coding_env", official_coding)]
    failed: list[str] = []
    for env, check in checks:
        try:
            async with official_server(python, env, checkout) as url:
                await check(url)
        except Exception as error:  # noqa: BLE001  whatever a check meets is its result
            failed.append(f"{check.__name__}: {type(error).__name__}: {error}")
    note = "" if checkout else "without the repository's own servers: OPENENV_CHECKOUT is not set"
    what = f"our client drives {package}'s server"
    return Row(PART, what, len(checks) - len(failed), len(checks), len(checks), note, failed)


@asynccontextmanager
async def official_server(python: Path, env: str = "", checkout: str | None = None) -> AsyncIterator[str]:
    """The address of an official server: of the script beside this one, or of an env of the checkout."""
    port = _free_port()
    if env:
        command = ["-m", "uvicorn", f"{env}.server.app:app", "--port", f"{port}", "--log-level", "error"]
        more = {"PYTHONPATH": f"{checkout}/envs"}
    else:
        command, more = [str(HERE / "openenv_server.py"), f"{port}", "2"], {}
    process = await asyncio.create_subprocess_exec(
        python, *command, env=os.environ | {"PYTHONPATH": ""} | more, stdin=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        await _wait_healthy(process, url)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _wait_healthy(process: asyncio.subprocess.Process, url: str) -> None:
    async with asyncio.timeout(_START_SECONDS), httpx.AsyncClient() as web:
        while process.returncode is None:
            try:
                if (await web.get(f"{url}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    raise PartFailed(f"the official server ended with {process.returncode}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


async def plain_fields(url: str) -> None:
    async with OpenEnvClient(url) as env:
        (spec,) = env.tools()
        assert (spec.name, list(spec.parameters["properties"])) == ("step", ["message"]), spec
        begun = await env.reset(Task("e1", "", metadata={"seed": 5}))
        assert "seed 5" in begun.observation, begun
        results = [await env.step("step", {"message": f"{number}"}) for number in range(3)]
        assert [result.reward for result in results] == [None, None, 1.0]
        assert [result.terminated for result in results] == [False, False, True]
        assert (await env.state())["episode_id"] == "e1"


async def errors_and_capacity(url: str) -> None:
    async with OpenEnvClient(url) as first, OpenEnvClient(url) as second:
        await first.reset()
        await second.reset()
        assert (await first.step("step", {"masage": "x"})).status is StepStatus.INVALID_CALL
        (failure,) = await asyncio.gather(first.step("step", {"message": "boom"}), return_exceptions=True)
        assert isinstance(failure, ServerFault), failure
        assert '"said": "on"' in (await first.step("step", {"message": "on"})).observation
        third = OpenEnvClient(url, ClientOptions(capacity_wait=0.5))
        (full,) = await asyncio.gather(third.reset(), return_exceptions=True)
        assert isinstance(full, CapacityError), full
        await third.close()


async def official_echo(url: str) -> None:
    async with OpenEnvClient(url) as env:
        assert [spec.name for spec in env.tools()] == ["echo_message", "echo_with_length"]
        await env.reset()
        assert (await env.step("echo_message", {"message": "hi"})).observation == "hi"
        assert (await env.step("nothing", {})).status is StepStatus.INVALID_CALL


async def official_coding(url: str) -> None:
    async with OpenEnvClient(url) as env:
        await env.reset()
        ran = await env.step("step", {"code": "x = 20\nprint(x + 1)"})
        assert (ran.observation, ran.status) == ("21", StepStatus.OK), ran
        failed = await env.step("step", {"code": "1 / 0"})
        assert failed.status is StepStatus.TASK_FAILED, failed
        assert (await env.step("step", {"cod": "1"})).status is StepStatus.INVALID_CALL
