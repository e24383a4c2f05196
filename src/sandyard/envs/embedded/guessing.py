"""Find a number in a bounded number of turns; the answers say higher or lower."""

from __future__ import annotations

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.embedded.base import GameEnv
from sandyard.errors import BadRequest

GUESS = ToolSpec(
    "guess",
    "Guess the number.",
    {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    },
)


class GuessingEnv(GameEnv):
    """`guess(number)`, at most `turns` times. Reward 1 when found; 0 when the turns are used up (truncated)."""

    def __init__(self, *, limit: int = 100, turns: int = 7) -> None:
        super().__init__()
        if limit < 1 or turns < 1:
            raise BadRequest(f"limit and turns must be positive, not {limit} and {turns}")
        self.limit = limit
        self.turns = turns
        self._secret = 0
        self._left = 0
        self.register_tool(GUESS, lambda env, arguments: self._guess(int(arguments["number"])))

    def deal(self) -> None:
        self._secret = self.random.randint(1, self.limit)
        self._left = self.turns

    def opening(self) -> str:
        return f"I think of a number from 1 to {self.limit}. You have {self.turns} guesses."

    def _guess(self, number: int) -> StepResult:
        self._left -= 1
        if number == self._secret:
            return StepResult("Right.", reward=1.0, terminated=True)
        hint = "Higher." if number < self._secret else "Lower."
        if self._left == 0:
            return StepResult(f"Wrong, and that was the last guess: it was {self._secret}.", reward=0.0, truncated=True)
        return StepResult(f"{hint} {self._left} guesses left.")
