"""`sandyard openenv serve` as a command: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Sequence

import pytest
from websockets.asyncio.client import connect

from tests.cli.conftest import Run

SERVE = (sys.executable, "-m", "sandyard", "openenv", "serve")


async def _run(*options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *SERVE, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, output.decode()


async def test_help_says_what_can_be_chosen() -> None:
    status, text = await _run("--help")
    assert status == 0
    for word in ("--backend", "--workers", "--max-sessions", "--imports", "--idle-timeout", "--step-timeout", "shell"):
        assert word in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--env", "nope"], "known: code, shell, echo"),
        (["--env", "json:dumps"], "json:dumps"),
        (["--env", "reasoning/nope"], "reasoning-gym data set 'nope'"),
        (["--env", "code", "--backend", "nope"], "there is no back end 'nope'"),
        (["--env", "code", "--backend", "memory", "--imports", "json"], "has no list of modules"),
        (["--env", "shell", "--backend", "memory"], "runs in a sandbox"),
        (["--env", "echo", "--host", "0.0.0.0"], "--allow-public"),
        (["--env", "echo", "--workers", "0"], "--workers"),
        (["--env", "echo", "--step-timeout", "0"], "step_timeout must be positive"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_served_is_refused_in_one_line(
    options: Sequence[str], why: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run("openenv", "serve", "--workers", "1", "--port", "0", *options)
    text = "".join(capsys.readouterr())
    assert status == 2, text
    assert why in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("noun", "module"), [("openenv", "uvicorn"), ("mcp", "mcp")])
async def test_without_its_extra_the_remedy_is_named(noun: str, module: str) -> None:
    code = f"import sys\nsys.modules[{module!r}] = None\nsys.argv[1:] = [{noun!r}, 'serve']\n"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", f"{code}from sandyard.cli import main\nmain()"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, f"sandyard[{noun}]" in errors.decode()) == (2, True), errors.decode()


async def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, text = await _run("--env", "echo", "--workers", "1", "--port", str(taken.getsockname()[1]))
    assert (status, "cannot listen" in text) == (1, True), text


async def test_it_serves_until_a_signal_and_then_drains() -> None:
    process = await asyncio.create_subprocess_exec(
        *SERVE, "--env", "echo", "--workers", "2", "--max-sessions", "3", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.fullmatch(r"echo at (http://\S+), 2 workers x 3 sessions\n", line)
        assert found, line
        async with connect(found.group(1).replace("http", "ws") + "/ws", proxy=None) as client:
            await client.send('{"type": "reset", "data": {}}')
            assert '"observation"' in str(await client.recv())
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(client.wait_closed(), 30)
            assert client.close_code == 1001
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
