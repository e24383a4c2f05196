"""The code env's twin without a sandbox, for tests: programs run as processes of this machine.

NOT isolated: a program sees this machine's files and network. Never let a trained policy near it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time

from sandyard.envs.base import Execution
from sandyard.envs.code import add_code_tools
from sandyard.envs.observation import DEFAULT_LIMIT
from sandyard.envs.toolenv import ToolEnv
from sandyard.tasks.base import Task

_READ_LIMIT = 1 << 20
_CHUNK = 1 << 16


class MemoryCodeEnv(ToolEnv):
    """`run_python` and `submit_solution` over `python -I` in a directory that dies with the episode."""

    def __init__(self, *, run_timeout: float = 10.0, observation_limit: int = DEFAULT_LIMIT) -> None:
        super().__init__(observation_limit=observation_limit)
        self.run_timeout = run_timeout
        self._directory: str | None = None
        add_code_tools(self, run_timeout=run_timeout)

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-u",
            "-",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        stdout, stderr = bytearray(), bytearray()
        timed_out = False
        try:
            async with asyncio.timeout(timeout or self.run_timeout):
                feeding = _feed(process.stdin, code.encode("utf-8", "surrogatepass"))
                await asyncio.gather(feeding, _keep(process.stdout, stdout), _keep(process.stderr, stderr))
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await _end(process)
        code_or_none = process.returncode if process.returncode is not None and process.returncode >= 0 else None
        return Execution(
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
            None if timed_out else code_or_none,
            timed_out,
            time.monotonic() - started,
        )

    async def _acquire(self, task: Task | None) -> None:
        self._directory = tempfile.mkdtemp(prefix="sandyard-memory-")

    async def _release(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


async def _feed(stdin: asyncio.StreamWriter, source: bytes) -> None:
    try:
        stdin.write(source)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # the interpreter ended without reading all of it; its exit code tells


async def _keep(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while chunk := await stream.read(_CHUNK):
        kept += chunk[: max(0, _READ_LIMIT - len(kept))]


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
