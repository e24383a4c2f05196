"""From a verdict to a reward: all tests > some > submitted > nothing.

The ceiling of a part (0.5) lies far under 1.0, so that a fake solution that passes the first test
is not worth learning; the floor of 0.1 for submitting gives the first gradient.
"""

from __future__ import annotations

from sandyard.errors import VerifierError
from sandyard.tasks.base import Task
from sandyard.verify.base import Verdict, Verifier

ALL_PASSED = 1.0
SUBMITTED = 0.1
PART = 0.4


def shape_reward(verdict: Verdict) -> float:
    """1.0 all passed; `0.1 + 0.4 * passed / total` some; 0.1 none; 0.0 not submitted.

    Raises `VerifierError` for a verdict that cannot be (no tests, more passed than there are).
    """
    if verdict.total <= 0:
        raise VerifierError("a verdict over no tests has no reward", remedy="give the task tests")
    if not 0 <= verdict.passed <= verdict.total:
        raise VerifierError(f"a verdict of {verdict.passed} passed out of {verdict.total} cannot be")
    if not verdict.submitted:
        return 0.0
    if verdict.passed == verdict.total:
        return ALL_PASSED
    return SUBMITTED + PART * (verdict.passed / verdict.total)


async def score(verifier: Verifier, task: Task, solution: str | None) -> float:
    """The shaped reward of `solution`; raises what `verify` raises."""
    return shape_reward(await verifier.verify(task, solution))
