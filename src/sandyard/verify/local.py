"""The verifier's twin without a sandbox, for tests: the same runner as a process of this machine.

NOT isolated: a solution sees this machine's files and network. As root its processes run under
user ids of their own; otherwise under the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import stat
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from sandyard.envs.base import Execution
from sandyard.verify.code import CodeVerifier, RunnerLauncher
from sandyard.verify.program import RunnerLimits, start_source

_FIRST_UID = 3_000_000
_UIDS_EACH = 1024
_STOP_TIMEOUT = 5.0
_SYSTEM_PYTHON = Path("/usr/bin/python3")


class LocalLauncher(RunnerLauncher):
    """Runs the runner with an interpreter that other user ids can read."""

    require_root = False
    _launches = itertools.count()

    def __init__(self, python: str | None = None) -> None:
        readable = _interpreter()
        self._python = python or readable or sys.executable
        self._drop = os.geteuid() == 0 and (python is not None or readable is not None)

    @property
    def uid_base(self) -> int:  # type: ignore[override]
        """Other user ids for every launch, so that runners at the same time do not meet."""
        if not self._drop:
            return 0
        place = (os.getpid() % 4000) * 64 + next(self._launches) % 64
        return _FIRST_UID + place * _UIDS_EACH

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        return await run_process([self._python, "-I", "-c", start_source()], stdin, timeout)


async def run_process(command: Sequence[str], stdin: bytes, timeout: float) -> Execution:
    """Run a runner as a process of this machine; whatever happens, it is ended with its boxes."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate(stdin)
    except TimeoutError:
        return Execution("", "", None, timed_out=True, duration=time.monotonic() - started)
    finally:
        await _stop(process)
    duration = time.monotonic() - started
    return Execution(stdout.decode(), stderr.decode(errors="replace"), process.returncode, duration=duration)


def local_verifier(limits: RunnerLimits = RunnerLimits()) -> CodeVerifier:
    """A `CodeVerifier` on this machine, for tests."""
    return CodeVerifier(LocalLauncher(), limits=limits)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the runner so that it can still end its boxes."""
    if process.returncode is not None:
        return
    process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _STOP_TIMEOUT)
    if process.returncode is None:
        process.kill()
        await process.wait()


def _interpreter() -> str | None:
    """An interpreter whose files every user id can reach; None if there is none."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    if _open_to_all(Path(sys.executable).resolve()) and _open_to_all(stdlib / "os.py"):
        return os.path.realpath(sys.executable)
    return str(_SYSTEM_PYTHON) if _SYSTEM_PYTHON.exists() and _open_to_all(_SYSTEM_PYTHON.resolve()) else None


def _open_to_all(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents) and bool(
        path.stat().st_mode & stat.S_IROTH
    )
