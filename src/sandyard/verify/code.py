"""The verifier of code tasks: hidden tests, one by one, where neither policy nor solution can reach.

Every verification has a fresh sandbox that no policy ever had, killed afterwards. What runs in it
is the runner (`runner/`, whose page states what it holds against); what comes back is believed only
if it bears the nonce and adds up.
"""

from __future__ import annotations

import asyncio
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping

from sandyard.connection import Connection, resolve_connection
from sandyard.envs.base import Execution
from sandyard.envs.lease import SandboxLease
from sandyard.envs.remote import RemoteSandbox
from sandyard.errors import CapacityError, GuestError, SandboxError, VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import TestOutcome, Verdict, Verifier
from sandyard.verify.program import RunnerJob, RunnerLimits, make_job, read_results, start_source

_RUNNER_GRACE = 20.0  # seconds for starting and reporting, above the tests' own total


class RunnerLauncher(ABC):
    """Where the runner runs. `uid_base` is the first user id that its processes may take (0: none)."""

    uid_base: int = 60_000
    require_root: bool = True

    @abstractmethod
    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        """Run the runner once, on a machine of its own, with `stdin`."""


class SandboxLauncher(RunnerLauncher):
    """A fresh sandbox for every verification."""

    def __init__(
        self,
        connection: Connection | None = None,
        *,
        template: str = "base",
        lease: SandboxLease | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._connection = connection or resolve_connection()
        self._template = template
        self._lease = lease
        self._metadata = dict(metadata or {})

    async def launch(self, stdin: bytes, timeout: float) -> Execution:
        metadata = {**self._metadata, "sandyard.role": "verifier", **(self._lease.metadata if self._lease else {})}
        sandbox = await RemoteSandbox.create(
            self._connection, self._template, timeout=timeout + 2 * _RUNNER_GRACE, metadata=metadata
        )
        try:
            command = f"exec python3 -I -c {shlex.quote(start_source())}"
            return await sandbox.run(command, timeout=timeout, user="root", stdin=stdin, close_stdin=False)
        finally:
            await sandbox.close()


class CodeVerifier(Verifier):
    """Scores solutions. Any number of `verify` calls may run at once.

    A verification that the infrastructure failed is done again on a fresh sandbox, `attempts` times
    in all; a lack of room is waited for, `patience` seconds in all.
    """

    def __init__(
        self,
        launcher: RunnerLauncher,
        *,
        limits: RunnerLimits = RunnerLimits(),
        attempts: int = 2,
        patience: float = 60.0,
    ) -> None:
        self._launcher = launcher
        self._limits = limits
        self._attempts = attempts
        self._patience = patience

    async def verify(self, task: Task, solution: str | None) -> Verdict:
        total = len(task.tests)
        if solution is None:
            return Verdict(submitted=False, passed=0, total=total)
        attempt = 1
        while True:
            try:
                return await self._verify_once(task, solution)
            except (VerifierError, SandboxError):
                if attempt >= self._attempts:
                    raise
                attempt += 1

    async def _verify_once(self, task: Task, solution: str) -> Verdict:
        launcher = self._launcher
        job = make_job(task, solution, self._limits, uid_base=launcher.uid_base, require_root=launcher.require_root)
        execution = await self._launch(job)
        if execution.timed_out or execution.exit_code != 0:
            raise VerifierError(f"task {task.task_id}: the runner {_ending(execution)}")
        results = read_results(job, execution.stdout)
        passed = sum(result.outcome is TestOutcome.PASSED for result in results)
        return Verdict(submitted=True, passed=passed, total=job.total, results=tuple(results))

    async def _launch(self, job: RunnerJob) -> Execution:
        timeout = min(self._limits.total_timeout, job.total * self._limits.test_timeout) + _RUNNER_GRACE
        waited = 0.0
        while True:
            try:
                return await self._launcher.launch(job.stdin, timeout)
            except GuestError as error:
                raise VerifierError(f"the runner did not start: {error}") from error
            except CapacityError as error:
                if waited >= self._patience:
                    raise
                await asyncio.sleep(error.retry_after)
                waited += error.retry_after

    async def close(self) -> None:
        """Nothing is held between verifications."""


def _ending(execution: Execution) -> str:
    if execution.timed_out:
        return f"ran out of time after {execution.duration:.1f} s"
    how = "was killed by a signal" if execution.exit_code is None else f"ended with {execution.exit_code}"
    said = execution.stderr.strip()[-500:]
    return f"{how} after {execution.duration:.1f} s" + (f": {said}" if said else "")
