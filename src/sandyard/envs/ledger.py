"""What an episode earned: one account for all that acted in it."""

from __future__ import annotations

import math

from sandyard.envs.base import StepResult, StepStatus
from sandyard.errors import VerifierError


class Ledger:
    """Adds up the rewards of one episode, whichever tool they came from.

    `reward` is their sum, None while none was due. `failed` is what an infrastructure error said: it takes
    nothing from the account and gives nothing to it, but such an episode has no score.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The next episode."""
        self.reward: float | None = None
        self.last: StepResult | None = None
        self.done = False
        self.failed: str | None = None

    def record(self, result: StepResult) -> StepResult:
        """Enter the answer to reset or step, and return it. Raises `VerifierError` for a reward that is no
        finite number: it would make a whole batch NaN."""
        self.last = result
        if result.status is StepStatus.INFRA_ERROR:
            self.fail(result.observation or "infrastructure error")
            return result
        self.done = self.done or result.done
        if result.reward is not None:
            if not math.isfinite(result.reward):
                raise VerifierError(f"the env gave the reward {result.reward}, not a finite number")
            self.reward = (self.reward or 0.0) + result.reward
        return result

    def fail(self, why: str) -> None:
        """The infrastructure failed under the episode; the first failure is kept."""
        self.failed = self.failed or why

    @property
    def score(self) -> float | None:
        """What the policy is due: None where the infrastructure failed, 0 where it played and earned nothing."""
        return None if self.failed is not None else self.reward or 0.0
