"""Names of what went wrong under a rollout: never scored, counted and shown by these reasons."""

from __future__ import annotations

from sandyard.errors import (
    AgentLinkError,
    CapacityError,
    CreateFailed,
    SandboxDied,
    SandyardError,
    TaskError,
    VerifierError,
)
from sandyard.errors import is_infrastructure as is_infrastructure


class DeadlineExceeded(SandyardError):
    """A deadline of ours passed: nobody's action. `name` is that of the deadline."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"deadline {name} ({seconds:g} s) passed")
        self.name = name


class EnvFailed(SandyardError):
    """The env answered a step with INFRA_ERROR."""


def mask_reason(error: BaseException) -> str:
    """The reason under which a failure is counted: the boundary, and what is known beyond it.

    An error that is not one of ours: `error:TYPE`."""
    match error:
        case SandboxDied():
            return f"sandbox:{error.reason}"
        case CreateFailed():
            return "sandbox:create"
        case AgentLinkError():
            return "sandbox:link"
        case CapacityError():
            return "capacity"
        case VerifierError():
            return "verifier"
        case TaskError():
            return "task"
        case DeadlineExceeded():
            return f"deadline:{error.name}"
        case EnvFailed():
            return "sandbox:env"
        case SandyardError():
            return str(error.boundary)
    return f"error:{type(error).__name__}"
