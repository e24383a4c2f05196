"""Whether the kernel killed a process for want of memory: the exit alone looks like any other SIGKILL."""

from __future__ import annotations

import signal

import structlog

from sandyard.errors import SandyardError
from sandyard.guest.base import ExitStatus
from sandyard.sandboxes import Sandbox

log = structlog.get_logger("sandyard.envd")

_SHELL_SAYS_KILLED = 128 + signal.SIGKILL


class MemoryWatch:
    """Compares the sandbox's count of kills with what was told before.

    The count names no process: of two commands that are killed at the same moment, one by hand and
    one by the kernel, either may be told as out of memory.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._told = 0

    async def why(self, status: ExitStatus) -> str | None:
        """A reason if the exit is a SIGKILL, of the process or of what its shell ran, and the count rose."""
        if status.signal != signal.SIGKILL and status.code != _SHELL_SAYS_KILLED:
            return None
        try:
            kills = (await self._sandbox.instance.usage()).oom_kills
        except (SandyardError, OSError) as error:
            log.info("no count of kills", sandbox=self._sandbox.id, error=str(error))
            return None
        rose, self._told = kills > self._told, kills
        limit = self._sandbox.resources.memory_mb
        return f"out of memory: the sandbox's limit is {limit} MiB" if rose else None
