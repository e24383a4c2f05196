"""Envs, leases and the verifier over real sandboxes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from sandyard.config import PoolSettings
from sandyard.connection import Connection
from sandyard.envs.backends import sandbox as backend
from sandyard.envs.base import StepStatus
from sandyard.envs.lease import SandboxLease
from sandyard.envs.remote import RemoteSandbox
from sandyard.envs.sandbox import SandboxEnv
from sandyard.errors import (
    AgentLinkError,
    CapacityError,
    CreateFailed,
    DeathReason,
    GuestError,
    NotFound,
    SandboxDied,
    SandboxError,
    Unauthorized,
)
from sandyard.server.embedded import EmbeddedServer
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome
from sandyard.verify.code import CodeVerifier, SandboxLauncher
from sandyard.verify.evaluate import evaluate_solutions
from sandyard.verify.program import RunnerLimits
from tests.envs.helpers import hold_to_its_word
from tests.yard import node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(240), pytest.mark.usefixtures("base_template")]


@pytest.fixture
async def env(connection: Connection) -> AsyncIterator[SandboxEnv]:
    async with SandboxEnv(api_url=connection.api_url, api_key=connection.api_key, command_timeout=5) as env:
        await env.reset()
        yield env


async def test_the_default_tools(env: SandboxEnv) -> None:
    assert [spec.name for spec in env.tools()] == ["run_command", "read_file", "write_file"]
    assert (await env.step("run_command", {"command": "whoami; pwd"})).observation == "user\n/home/user"
    failed = await env.step("run_command", {"command": "echo héé; echo no >&2; exit 3"})
    assert (failed.status, failed.observation) == (StepStatus.TASK_FAILED, "héé\n[stderr]\nno\n[exit code 3]")
    await env.step("write_file", {"path": "a/b 'c'.txt", "content": "漢字\n"})
    assert (await env.step("read_file", {"path": "a/b 'c'.txt"})).observation == "漢字"
    assert "No such file" in (await env.step("read_file", {"path": "none"})).observation
    assert (await env.step("write_file", {"path": "/proc/x", "content": ""})).status is StepStatus.INVALID_CALL
    assert (await env.step("run_command", {"command": "a\0b"})).status is StepStatus.INVALID_CALL
    assert (await env.step("run_command", {"command": "x" * 200_000})).status is StepStatus.INVALID_CALL
    assert (await env.step("write_file", {"path": "s", "content": "\ud800"})).status is StepStatus.INVALID_CALL


async def test_registered_tools(env: SandboxEnv) -> None:
    schema = {
        "name": "grep",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    }
    env.register_command_tool(schema, "cd /etc && grep -c {text} passwd")
    assert (await env.step("grep", {"text": "root:x"})).observation == "1"
    assert (await env.step("grep", {"text": "'; echo hi; '"})).observation == "0\n[exit code 1]"

    async def lines(env: SandboxEnv, arguments: Mapping[str, object]) -> str:
        done = await env.sandbox.commands.run("cat /etc/passwd")
        return str(len(done.stdout.splitlines()) > 5)

    env.register_tool({"name": "lines"}, lines)
    assert (await env.step("lines", {})).observation == "True"


async def test_execute_is_raw(env: SandboxEnv) -> None:
    ran = await env.execute("import sys\nprint('$HOME `id` \\'')\nprint('e', file=sys.stderr)\nsys.exit(4)")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.timed_out) == ("$HOME `id` '\n", "e\n", 4, False)
    long = await env.execute("x = 1\n" * 60_000 + "print(x)")
    assert (long.stdout, long.exit_code) == ("1\n", 0)
    slow = await env.execute("import time\nprint('a')\ntime.sleep(60)", timeout=1)
    assert (slow.stdout, slow.exit_code, slow.timed_out) == ("a\n", None, True)
    killed = await env.execute("import os\nos.kill(os.getpid(), 9)")
    assert (killed.exit_code, killed.timed_out) == (None, False)
    assert not (await env.execute("print(1)\0")).timed_out  # what it prints differs from Python to Python


async def test_an_endless_flood_is_bounded(env: SandboxEnv) -> None:
    started = time.monotonic()
    flood = await env.run("yes", timeout=60)
    assert time.monotonic() - started < 40
    assert len(flood.stdout) < 1.1 * (1 << 20)
    assert "printed without end" in flood.stderr


async def test_the_sandbox_prompt_is_true(connection: Connection) -> None:
    url, key = connection.api_url, connection.api_key
    async with backend.make_env(run_timeout=1, api_url=url, api_key=key) as env:
        await env.reset()
        await hold_to_its_word(env, backend.system_prompt(max_turns=4, run_timeout=1))


async def test_setup_commands_run_as_root_or_the_reset_fails(connection: Connection) -> None:
    url, key = connection.api_url, connection.api_key
    async with SandboxEnv("base", url, key, setup_commands=["id -u > /opt/who"], sandbox_envs={"HUE": "blue"}) as env:
        await env.reset()
        assert (await env.step("run_command", {"command": "cat /opt/who; echo $HUE"})).observation == "0\nblue"
    async with SandboxEnv("base", url, key, setup_commands=["echo why >&2; exit 7"]) as env:
        with pytest.raises(CreateFailed, match="setup: 'echo why >&2; exit 7' ended with 7: why"):
            await env.reset()
    assert await running(connection) == 0


async def running(connection: Connection) -> int:
    async with SandboxLease(connection) as lease:
        return (await lease.capacity()).running


async def test_a_sandbox_that_died_says_of_what(connection: Connection) -> None:
    sandbox = await RemoteSandbox.create(connection)
    waiting = asyncio.ensure_future(sandbox.run("sleep 60", timeout=60))
    await asyncio.sleep(0.5)
    await sandbox.handle.kill()
    with pytest.raises(SandboxDied) as caught:
        await waiting
    assert caught.value.reason is DeathReason.KILLED
    with pytest.raises(SandboxDied):
        await sandbox.run("true", timeout=5)
    await sandbox.close()
    short = await RemoteSandbox.create(connection, timeout=1)
    with pytest.raises(SandboxDied) as caught:
        await short.run("sleep 20", timeout=20)
    assert caught.value.reason is DeathReason.TIMEOUT


async def test_refusals_name_the_fault(connection: Connection) -> None:
    with pytest.raises(NotFound, match="template 'bsae'"):
        await RemoteSandbox.create(connection, "bsae")
    wrong = Connection(connection.api_url, "e2b_" + "0" * 40, connection.api_url)
    with pytest.raises(Unauthorized):
        await RemoteSandbox.create(wrong)
    with pytest.raises(Unauthorized):
        async with SandboxLease(wrong):
            pass
    nobody = Connection("http://127.0.0.1:9", connection.api_key, "http://127.0.0.1:9")
    with pytest.raises((CreateFailed, SandboxError)):
        await RemoteSandbox.create(nobody)
    with pytest.raises(SandboxError, match="does not answer"):
        async with SandboxLease(nobody):
            pass
    sandbox = await RemoteSandbox.create(connection)
    with pytest.raises(GuestError):
        await sandbox.run("true", timeout=5, cwd="/no/such/place")
    await sandbox.close()


async def test_a_full_server_is_a_lack_of_room() -> None:
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    settings = node_settings(home, max_count=1).model_copy(update={"pool": PoolSettings.model_validate({"low": 0})})
    with EmbeddedServer(settings) as server:
        connection = Connection.to(server)
        first = await RemoteSandbox.create(connection)
        with pytest.raises(CapacityError) as caught:
            await RemoteSandbox.create(connection)
        assert caught.value.retry_after > 0
        await first.close()
        await (await RemoteSandbox.create(connection)).close()
    shutil.rmtree(home)


async def test_a_server_that_is_killed_is_the_hosts_doing() -> None:
    home = Path(tempfile.mkdtemp(prefix="sy-", dir="/tmp"))
    settings = node_settings(home)
    with EmbeddedServer(settings) as server:
        sandbox = await RemoteSandbox.create(Connection.to(server))
        waiting = asyncio.ensure_future(sandbox.run("sleep 30", timeout=30))
        await asyncio.sleep(0.5)
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises((SandboxDied, AgentLinkError)) as caught:
            await waiting
        assert isinstance(caught.value, SandboxDied)
        assert caught.value.reason is DeathReason.HOST
        await sandbox.close()
    with EmbeddedServer(settings):  # what the killed one left goes when the next starts
        pass
    shutil.rmtree(home)


async def test_a_lease_ends_what_it_holds(connection: Connection) -> None:
    async with SandboxLease(connection, ttl=2, labels={"run": "t"}, warm={"base": 1}) as lease:
        env = SandboxEnv(lease=lease)
        await env.reset()
        await asyncio.sleep(3)  # renewed meanwhile
        assert (await env.step("run_command", {"command": "echo on"})).observation == "on"
        assert (await lease.capacity()).running == 1
    with pytest.raises(SandboxDied):
        await env.step("run_command", {"command": "echo on"})
    await env.close()


async def test_a_cancelled_create_leaves_nothing(connection: Connection) -> None:
    before = await running(connection)
    for delay in (0.0, 0.002, 0.004, 0.006):
        making = asyncio.ensure_future(RemoteSandbox.create(connection))
        await asyncio.sleep(delay)
        making.cancel()
        await asyncio.wait({making})
        if not making.cancelled():  # it was done before
            await making.result().close()
    assert await running(connection) == before


TASK = Task("t", "Add.", ("assert add(1, 2) == 3", "assert add(2, 2) == 4"), reference="def add(a, b): return a + b")


async def test_verification_in_a_sandbox(connection: Connection) -> None:
    verifier = CodeVerifier(SandboxLauncher(connection), limits=RunnerLimits(cpu_timeout=1, test_timeout=3))
    assert (await verifier.verify(TASK, TASK.reference)).passed == 2
    hostile = """
import os, subprocess, sys
assert os.getuid() >= 60000
assert subprocess.run(['sudo', '-n', 'true'], capture_output=True).returncode != 0
print('TESTS_PASSED 2 2')
for pid in filter(str.isdigit, os.listdir('/proc')):
    for name in ('mem', 'environ', 'fd/0', 'fd/1', 'cwd'):
        try:
            if int(pid) != os.getpid():
                os.stat(f'/proc/{pid}/{name}') and open(f'/proc/{pid}/{name}', 'rb')
                raise SystemExit('reached ' + pid)
        except OSError:
            continue
def add(a, b):
    return a + b
"""
    verdict = await verifier.verify(TASK, hostile)
    assert [result.detail for result in verdict.results] == ["", ""]
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert (await verifier.verify(TASK, bomb)).passed == 0
    hog = """
import os
for _ in range(20):
    if os.fork() == 0:
        x = bytearray(200 << 20)
        while True:
            pass
"""
    verdict = await verifier.verify(TASK, hog + "def add(a, b): return a + b")
    assert verdict.total == 2
    assert all(result.outcome in TestOutcome for result in verdict.results)
    assert await running(connection) == 0


async def test_evaluation_keeps_faults_apart(connection: Connection) -> None:
    broken = Task("broken", "p", ("assert f()",), setup_code="root = Node(1)", reference="def f(): return 1")
    tasks = [TASK, broken, Task("w", "p", ("assert f() == 1",), reference="def f(): return 2")]
    seen: list[int] = []
    report = await evaluate_solutions(
        tasks, "reference", CodeVerifier(SandboxLauncher(connection)), on_progress=lambda done, total: seen.append(done)
    )
    assert [score.reward for score in report.scores] == [1.0, None, 0.1]
    assert (report.full, report.mean, len(report.scored), seen) == (1, 0.55, 2, [1, 2, 3])
    assert set(report.failures) == {"task", "failed"}
    assert "NameError: name 'Node' is not defined" in report.failures["task"][0].detail
    assert report.infrastructure == {}
    assert any("Node" in line for line in report.lines())
