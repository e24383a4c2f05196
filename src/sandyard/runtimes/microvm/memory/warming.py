"""What is run in a guest before it becomes a base: the shell that nearly all commands begin with is then in the cache
of each of its copies. None of the template's own scripts runs: what they made would be the same in every copy."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from sandyard.errors import CreateFailed, GuestError
from sandyard.guest.base import Process, ProcessSpec
from sandyard.guest.shell import BASH
from sandyard.runtimes.microvm.instance import MicroVMInstance

_PATIENCE, _END = 60.0, 30.0


async def warm(instance: MicroVMInstance) -> None:
    """Leaves no process and no file. Raises `CreateFailed` where a process does not end, `AgentLinkError`."""
    try:
        shell = await instance.agent.spawn(ProcessSpec([BASH, "--noprofile", "--norc", "-c", "true"]))
    except GuestError:
        return  # a template without one
    if not await _ends(shell, _PATIENCE):
        with suppress(GuestError):  # it has ended just now
            await shell.signal(signal.SIGKILL)
        if not await _ends(shell, _END):
            raise CreateFailed("base", f"a process in it does not end: {shell.pid}")


async def _ends(process: Process, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        return False
    except GuestError:  # it did not even begin
        return True
    return True
