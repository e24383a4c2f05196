"""Blackjack by the rules of gymnasium's toy text game: an endless deck, the dealer stands on 17."""

from __future__ import annotations

from collections.abc import Sequence

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.embedded.base import GameEnv

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
HIT = ToolSpec("hit", "Take another card.", _NO_ARGUMENTS)
STAND = ToolSpec("stand", "Take no more cards; the dealer plays, and the episode ends.", _NO_ARGUMENTS)
DECK = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
DEALER_STANDS = 17


def has_usable_ace(hand: Sequence[int]) -> bool:
    return 1 in hand and sum(hand) + 10 <= 21


def hand_value(hand: Sequence[int]) -> int:
    """The best sum: one ace counts eleven where that does not bust."""
    return sum(hand) + 10 if has_usable_ace(hand) else sum(hand)


class BlackjackEnv(GameEnv):
    """`hit()` and `stand()`. Reward 1 for a win, 0 for a draw, -1 for a loss.

    `natural`: a winning hand of ace and ten gets 1.5, unless the dealer has one too. Then the reward
    is the only one here beyond 1.
    """

    def __init__(self, *, natural: bool = False) -> None:
        super().__init__()
        self.natural = natural
        self.player: list[int] = []
        self.dealer: list[int] = []
        self.register_tool(HIT, lambda env, arguments: self._hit())
        self.register_tool(STAND, lambda env, arguments: self._stand())

    def deal(self) -> None:
        self.dealer = [self._draw(), self._draw()]
        self.player = [self._draw(), self._draw()]

    def opening(self) -> str:
        return f"Blackjack. {self._table()} Use hit or stand."

    def _draw(self) -> int:
        return self.random.choice(DECK)

    def _table(self) -> str:
        ace = ", with a usable ace" if has_usable_ace(self.player) else ""
        cards = ", ".join(map(str, self.player))
        return f"Your hand: {cards} (sum {hand_value(self.player)}{ace}). The dealer shows {self.dealer[0]}."

    def _hit(self) -> StepResult:
        self.player.append(self._draw())
        if hand_value(self.player) > 21:
            return StepResult(f"{self._table()} Bust: you lose.", reward=-1.0, terminated=True)
        return StepResult(self._table())

    def _stand(self) -> StepResult:
        while hand_value(self.dealer) < DEALER_STANDS:
            self.dealer.append(self._draw())
        theirs = hand_value(self.dealer)
        mine = hand_value(self.player)
        reward = float((mine > theirs or theirs > 21) - (mine < theirs <= 21))
        if self.natural and reward == 1.0 and sorted(self.player) == [1, 10] and sorted(self.dealer) != [1, 10]:
            reward = 1.5
        word = "You win." if reward > 0 else "You lose." if reward < 0 else "A draw."
        return StepResult(f"Your sum is {mine}, the dealer's {theirs}. {word}", reward=reward, terminated=True)
