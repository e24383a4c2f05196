"""How long-running work tells what it does, and commands that are watched while they run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sandyard.errors import HostError

# stage, fraction of the whole done (None: unknown), one line for people
Progress = Callable[[str, float | None, str], None]


def silent(stage: str, fraction: float | None, line: str) -> None:
    """A `Progress` for callers that do not watch."""


async def run_watched(
    command: Sequence[str],
    on_line: Callable[[str], None],
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> None:
    """Run a command, handing on each line it says. The whole process group dies with a cancellation.

    Raises `HostError` with the last lines when it is missing or fails.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **env} if env is not None else None,
            pass_fds=pass_fds,
            start_new_session=True,
            limit=1 << 20,
        )
    except OSError as error:
        raise HostError(f"{command[0]}: {error.strerror}") from error
    last: list[str] = []
    assert process.stdout is not None  # asked for above
    try:
        async for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            if line:
                last = [*last[-4:], line]
                on_line(line)
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if code != 0:
        raise HostError(f"{command[0]} ended with {code}: {' | '.join(last)}")
