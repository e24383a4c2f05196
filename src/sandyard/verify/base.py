"""The contract of a verifier: what turns a final state into a reward, out of the policy's reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sandyard.tasks.base import Task


class TestOutcome(StrEnum):
    __test__ = False  # not a test class, whatever its name says

    PASSED = "passed"
    FAILED = "failed"  # the assertion is false
    CRASHED = "crashed"  # the solution or the test raised something else, or the process ended
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class TestResult:
    __test__ = False

    index: int
    outcome: TestOutcome
    detail: str = ""  # last line of the traceback, bounded


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier saw. `passed <= total`, `total == len(task.tests)`, `results` one per test."""

    submitted: bool
    passed: int
    total: int
    results: Sequence[TestResult] = field(default_factory=tuple)


class Verifier(ABC):
    @abstractmethod
    async def verify(self, task: Task, solution: str | None) -> Verdict:
        """Score `solution` (None: never submitted) on every test of `task`.

        Raises `VerifierError`, `SandboxError` or `CapacityError` when it could not find out: never
        a verdict that was not seen.
        """

    @abstractmethod
    async def close(self) -> None: ...
