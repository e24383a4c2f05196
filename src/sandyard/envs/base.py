"""The RL-facing object: one env per trajectory, whatever executes behind it.

An env gives the policy tools and answers with observations. It does not score: a verifier does,
after the rollout (`execute` is its raw access). The async form is the core; `sync.py` wraps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from sandyard.tasks.base import Task


class StepStatus(StrEnum):
    OK = "ok"
    TASK_FAILED = "task_failed"  # the policy's action failed (exit code, exception): data
    TIMEOUT = "timeout"  # the policy's action ran too long: data
    UNSUPPORTED = "unsupported"  # this back end does not execute such a program as CPython does
    INVALID_CALL = "invalid_call"  # unknown tool, arguments that do not fit its schema: data
    INFRA_ERROR = "infra_error"  # nobody's action: the rollout is retried or masked


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to reset or step.

    `terminated`: the episode ended by its own rules (submitted). `truncated`: it was cut (turns,
    time). `reward` is None where none is due: envs here leave scoring to the verifier.
    """

    observation: str = ""
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    status: StepStatus = StepStatus.OK
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Execution:
    """Raw result of running something in the env: what a scorer looks at, never a text for the policy.

    `exit_code` is None when the program was ended (`timed_out`, or by signal)."""

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool = False
    duration: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a chat template and a policy see it: `parameters` is JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_openai(self) -> dict[str, Any]:
        """The `tools=` entry that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Env(ABC):
    """One episode at a time. Made closed; `reset` acquires; `close` releases and is idempotent.

    `reset` and `step` raise only infrastructure errors (`SandboxError`, `CapacityError`) and
    programming errors; everything the policy does wrong is a StepResult.

    `lives_elsewhere` says where, if the episode's state is not in this process and its children: such
    an env gains nothing in a pool, and is refused there.
    """

    lives_elsewhere: ClassVar[str] = ""

    @abstractmethod
    async def reset(self, task: Task | None = None) -> StepResult: ...

    @abstractmethod
    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        """Do one tool call. After `terminated` every further step is INVALID_CALL and changes nothing."""

    @abstractmethod
    def tools(self) -> Sequence[ToolSpec]: ...

    def time_limits(self) -> Mapping[str, float]:
        """Seconds after which tools end by themselves, by name; those without a limit are left out."""
        return {}

    @abstractmethod
    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Run a Python program, raw, outside the episode's accounting."""

    @property
    @abstractmethod
    def submission(self) -> str | None:
        """The final answer that the policy recorded, or None."""

    @abstractmethod
    async def close(self) -> None: ...
