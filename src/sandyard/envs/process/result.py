"""What one run in a session gives."""

from __future__ import annotations

from dataclasses import dataclass

from sandyard.envs.base import Execution, StepStatus


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """`status` is `ok`, `task_failed` (the program raised, its exit code is not 0, or it ended the session) or
    `timeout`. `exit_code` is None when a signal or the end of the session took its place.

    `ending` says how it ended, where an exit code does not. `state_lost`: the session is over and its names with
    it; `restart` begins a new one."""

    status: StepStatus
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = 0
    ending: str = ""
    state_lost: bool = False
    duration: float = 0.0  # seconds

    @property
    def timed_out(self) -> bool:
        return self.status is StepStatus.TIMEOUT

    @property
    def execution(self) -> Execution:
        """The same as a scorer reads it."""
        said = f"[{self.ending}]\n" if self.ending else ""
        return Execution(self.stdout, self.stderr + said, self.exit_code, self.timed_out, self.duration)
