"""What one run of the interpreter gives."""

from __future__ import annotations

from dataclasses import dataclass

from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter.refusal import Refusal


@dataclass(frozen=True, slots=True)
class InterpreterResult:
    """`status` is `ok`, `task_failed` (the program raised, or its exit code is not 0), `timeout`, `unsupported`
    or `infra_error`.

    `stdout` is what was printed, at most the limit; empty when the program was stopped. `error` is the last line
    of the traceback, or what went wrong. `refusal` is set when the status is `unsupported` through the guard.
    `state_lost`: the session's names are gone with the worker; the next run begins without any.
    """

    status: StepStatus
    stdout: str = ""
    error: str = ""
    refusal: Refusal | None = None
    state_lost: bool = False
    duration: float = 0.0  # seconds
