"""What is run in a guest before it becomes a base: the programs that most sandboxes begin with are then in the cache
of each of its copies, which share the pages, and none reads them from its disk."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from sandyard.errors import CreateFailed, GuestError
from sandyard.guest.base import Process, ProcessSpec
from sandyard.guest.shell import BASH
from sandyard.runtimes.base import Resources
from sandyard.runtimes.microvm.instance import MicroVMInstance

_PATIENCE, _END = 60.0, 30.0
_LEAST = Resources(memory_mb=128, pids=16)
"""A guest that allows less gets the shell only: what is refused or killed would be counted in every copy."""
# Programs only, never a script of the template's: what that made would be the same in every copy.
_PROGRAMS = r"""
LC_ALL=C
warm() {
    local path magic
    path=$(type -P "$1") && IFS= read -rN4 magic <"$path" && [ "$magic" = $'\x7fELF' ] && "$path" "${@:2}"
}
warm id
warm ls -d /
warm git --version
warm python3 -I -S -B -c 'import http.server'
"""


async def warm(instance: MicroVMInstance) -> None:
    """Leaves no process and no file. Raises `CreateFailed` where a process does not end, `AgentLinkError`."""
    limits = instance.spec.resources
    small = limits.memory_mb < _LEAST.memory_mb or limits.pids < _LEAST.pids
    script = "true" if small else f"exec >/dev/null 2>&1\n{_PROGRAMS}"
    try:
        shell = await instance.agent.spawn(ProcessSpec([BASH, "--noprofile", "--norc", "-c", script]))
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
