"""The error tree, and the model of what each failure means. Read this first.

Every failure belongs to exactly one *boundary*. The boundary decides who pays for it:

    policy      what the model did: a crash, a wrong answer, a command that ran too long.
                Data, not an exception in the trainer. A reward is due.
    task        the task itself is broken (its own tests cannot run). Masked, reported by name.
    verifier    the verifier failed, not the solution. Masked, retried once on a fresh sandbox.
    sandbox     the sandbox died under the rollout; carries the reason of death
                (oom, timeout, killed, crashed, host, disk). Never reward 0.
    capacity    there was no room. Carries when to retry and why placement failed.
    client      the caller's mistake: a bad argument, a wrong key, an unknown template.

A failure of the infrastructure (task, verifier, sandbox, capacity) is never scored: it is retried
on a fresh sandbox if nothing was observed yet, else the rollout is masked out of its group, counted
and shown. The caller's mistake (client) and an error that is not of this tree, a fault of the program,
are no rollout's: they end the run. The tree:

    SandyardError
    ├── ClientError                 boundary client
    │   ├── BadRequest              (ValueError) names the field
    │   ├── Unauthorized            missing or wrong key
    │   ├── Forbidden               it is there to use, and not the caller's to change
    │   ├── NotFound                (LookupError) names what was looked for, and near names
    │   ├── Conflict                the state does not allow it
    │   ├── Unsupported             this runtime cannot do it; said before acting
    │   └── ConfigError             (ValueError) names key and source
    ├── CapacityError               boundary capacity; retry_after seconds
    ├── SandboxError                boundary sandbox
    │   ├── CreateFailed            names the stage that failed; nothing is left behind
    │   ├── SandboxDied             reason of death
    │   ├── HostFull                the host's disk has no room; the sandbox goes on when it has
    │   └── AgentLinkError          (ConnectionError) the link to the agent broke or lied
    ├── GuestError                  an operation inside the sandbox failed (errno-like code): the
    │                               caller of the operation decides whose fault it is
    ├── HostError                   the machine lacks something; `remedy` says what to do
    ├── TaskError                   boundary task (ValueError) names file and line
    └── VerifierError               boundary verifier

Every message names what failed, where, and (where there is one) the remedy, in one line.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Boundary(StrEnum):
    POLICY = "policy"
    TASK = "task"
    VERIFIER = "verifier"
    SANDBOX = "sandbox"
    CAPACITY = "capacity"
    CLIENT = "client"


class DeathReason(StrEnum):
    """Why a sandbox is no more."""

    OOM = "oom"
    DISK = "disk"
    TIMEOUT = "timeout"
    LEASE = "lease"
    KILLED = "killed"
    CRASHED = "crashed"
    HOST = "host"


class SandyardError(Exception):
    """Base of every error Sandyard raises on purpose."""

    boundary: Boundary = Boundary.SANDBOX
    http_status: int = 500

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """Whole after a trip to another process, whatever a subclass's own arguments are."""
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[SandyardError], args: tuple[Any, ...]) -> SandyardError:
    return kind.__new__(kind, *args)


class ClientError(SandyardError):
    boundary = Boundary.CLIENT
    http_status = 400


class BadRequest(ClientError, ValueError):
    """A malformed request. `field` is the dotted name of the offending field, if one is to blame."""

    def __init__(self, message: str, *, field: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.field = field


class Unauthorized(ClientError):
    http_status = 401


class Forbidden(ClientError):
    http_status = 403


class NotFound(ClientError, LookupError):
    http_status = 404


class Conflict(ClientError):
    http_status = 409


class Unsupported(ClientError):
    """The chosen runtime or back end cannot do this. Raised before anything happened."""


class ConfigError(ClientError, ValueError):
    """A setting is wrong. The message names the key and where it was set."""


class CapacityError(SandyardError):
    """No room. `retry_after` is in seconds."""

    boundary = Boundary.CAPACITY
    http_status = 429

    def __init__(self, message: str, *, retry_after: float = 1.0, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after = retry_after


class SandboxError(SandyardError):
    boundary = Boundary.SANDBOX


class CreateFailed(SandboxError):
    """Creation failed at `stage`; everything acquired before it was released."""

    def __init__(self, stage: str, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"create failed at {stage}: {message}", remedy=remedy)
        self.stage = stage


class SandboxDied(SandboxError):
    """The sandbox is gone. `reason` says why."""

    http_status = 502

    def __init__(self, sandbox_id: str, reason: DeathReason, detail: str = "") -> None:
        super().__init__(f"sandbox {sandbox_id} died: {reason}" + (f" ({detail})" if detail else ""))
        self.sandbox_id = sandbox_id
        self.reason = reason
        self.detail = detail


class HostFull(SandboxError):
    """The host's disk has no room for it. Nothing is lost: it can be tried again when there is."""


class AgentLinkError(SandboxError, ConnectionError):
    """The link to the agent is closed, timed out, or carried something that is not the protocol."""

    http_status = 502


class GuestErrorCode(StrEnum):
    """What went wrong inside the sandbox, as the agent reports it."""

    NOT_FOUND = "not_found"  # ENOENT: file, command or process
    EXISTS = "exists"  # EEXIST
    IS_DIRECTORY = "is_directory"
    NOT_DIRECTORY = "not_directory"
    PERMISSION = "permission"  # EACCES, EPERM
    NO_SPACE = "no_space"  # ENOSPC, EDQUOT
    NO_USER = "no_user"  # the user is not in /etc/passwd
    NO_CWD = "no_cwd"  # the working directory does not exist or is not a directory
    REFUSED = "refused"  # ECONNREFUSED: nothing listens on the port
    TOO_BIG = "too_big"  # E2BIG, ENAMETOOLONG, or a limit of the protocol
    INVALID = "invalid"  # EINVAL: the request makes no sense
    LIMIT = "limit"  # EAGAIN, EMFILE, ENOMEM: a limit of the sandbox was hit
    IO = "io"  # anything else


class GuestError(SandyardError):
    """An operation inside the sandbox failed; `code` says how."""

    http_status = 400

    def __init__(self, code: GuestErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class HostError(SandyardError):
    """The machine lacks something. `remedy` is one line a person can act on."""

    boundary = Boundary.SANDBOX


class TaskError(SandyardError, ValueError):
    boundary = Boundary.TASK
    http_status = 400


class VerifierError(SandyardError):
    boundary = Boundary.VERIFIER


def is_infrastructure(error: BaseException) -> bool:
    """Whether a rollout may be masked for it. Not for the caller's mistake (a wrong key, an unknown
    template) and not for a fault of the program: these meet every rollout alike and end the run. A broken
    connection or a timeout that an env let through bare is what it says."""
    if isinstance(error, SandyardError):
        return error.boundary is not Boundary.CLIENT
    return isinstance(error, ConnectionError | TimeoutError)
