"""The verifier of code tasks on the back end `process`: the runner in namespaces of its own on this machine."""

from __future__ import annotations

import itertools
import os

from sandyard.envs.base import Execution
from sandyard.envs.process.limits import SessionLimits
from sandyard.envs.process.server import SessionServer
from sandyard.errors import HostError
from sandyard.verify.code import CodeVerifier, RunnerLauncher
from sandyard.verify.program import RunnerLimits, start_source

_FIRST_UID = 1_800_000_000
_UIDS_EACH = 1024
_LAUNCHES = 100_000


class ProcessLauncher(RunnerLauncher):
    """Every verification is a fork of one warm process, with an own root, without network, as nobody else.

    Needs root: solution and tests run under user ids of their own. `close` ends the warm process.
    """

    _launches = itertools.count()

    def __init__(self, limits: RunnerLimits = RunnerLimits()) -> None:
        if os.geteuid() != 0:
            raise HostError(
                "back end process: solution and tests need user ids of their own",
                remedy="run as root, or verify on the back end sandbox",
            )
        # Judge and box, each with its own bound, and the runner beside them.
        self._server = SessionServer(SessionLimits(memory_mb=3 * limits.memory_mb, processes=128))

    @property
    def uid_base(self) -> int:  # type: ignore[override]
        """Other user ids for every launch: limits of processes count by user id."""
        return _FIRST_UID + next(self._launches) % _LAUNCHES * _UIDS_EACH

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        return await self._server.run_job(start_source(), stdin, timeout)

    async def close(self) -> None:
        """End the warm process; the next launch starts another."""
        await self._server.close()


class ProcessVerifier(CodeVerifier):
    """Scores as in a sandbox, on this machine. Raises `HostError` without root."""

    def __init__(self, *, limits: RunnerLimits = RunnerLimits()) -> None:
        self._processes = ProcessLauncher(limits)
        super().__init__(self._processes, limits=limits)

    async def close(self) -> None:
        """End the process that runners are forked from."""
        await self._processes.close()
