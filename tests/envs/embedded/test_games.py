"""The games: their rules, their rewards, and the same episode for the same seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from sandyard.envs.base import Env, StepResult, StepStatus
from sandyard.envs.embedded.blackjack import DECK, BlackjackEnv, hand_value, has_usable_ace
from sandyard.envs.embedded.echo import EchoEnv
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.embedded.maze import MOVES, MazeEnv
from sandyard.errors import BadRequest, Unsupported
from sandyard.tasks.base import Task

GAMES: list[Callable[[], Env]] = [EchoEnv, BlackjackEnv, GuessingEnv, MazeEnv]


def seeded(seed: object) -> Task:
    return Task("t", "", metadata={"seed": seed})


@pytest.mark.parametrize("make", GAMES)
async def test_the_same_seed_is_the_same_episode(make: Callable[[], Env]) -> None:
    first, second = make(), make()
    choices = random.Random(0)
    assert (await first.reset(seeded(5))).observation == (await second.reset(seeded(5))).observation
    for _ in range(100):
        name, arguments = _any_call(first, choices)
        result = await first.step(name, arguments)
        assert result == await second.step(name, arguments)
        assert (result.reward is not None) == result.done
        if result.done:
            break
    after = await first.step(name, arguments)
    assert after.status is StepStatus.INVALID_CALL or not result.done


def _any_call(env: Env, choices: random.Random) -> tuple[str, dict[str, object]]:
    spec = choices.choice(list(env.tools()))
    values = {"message": "hi", "number": choices.randint(1, 100), "direction": choices.choice(list(MOVES))}
    return spec.name, {name: values[name] for name in spec.parameters["properties"]}


@pytest.mark.parametrize("make", GAMES)
async def test_seeds_differ_and_wrong_ones_are_refused(make: Callable[[], Env]) -> None:
    env = make()
    with pytest.raises(BadRequest, match="seed must be an integer"):
        await env.reset(seeded("5"))
    result = await env.reset(Task("t", "Play well.", metadata={"seed": 1}))
    assert result.observation.startswith("Play well.\n")
    with pytest.raises(Unsupported):
        await env.execute("print(1)")
    await env.close()
    await env.close()


async def test_echo_is_rewarded_for_what_was_said() -> None:
    env = EchoEnv()
    await env.reset()
    assert (await env.step("echo", {"message": "grüß"})).observation == "grüß"
    assert (await env.step("stop", {})) == StepResult("Stopped.", reward=1.0, terminated=True)
    await env.reset()
    assert (await env.step("stop", {})).reward == 0.0


@pytest.mark.parametrize(
    ("hand", "value", "usable"),
    [
        ((1, 10), 21, True),
        ((1, 1, 9), 21, True),
        ((1, 10, 5), 16, False),
        ((10, 9), 19, False),
        ((10, 9, 5), 24, False),
    ],
)
def test_an_ace_counts_eleven_where_that_does_not_bust(hand: tuple[int, ...], value: int, usable: bool) -> None:
    assert (hand_value(hand), has_usable_ace(hand)) == (value, usable)


@pytest.mark.parametrize(
    ("player", "dealer", "reward"),
    [((10, 9), (10, 8), 1.0), ((10, 8), (10, 8), 0.0), ((10, 2), (10, 8), -1.0), ((1, 10), (10, 10), 1.0)],
)
async def test_blackjack_is_scored_against_the_dealer(
    player: tuple[int, ...], dealer: tuple[int, ...], reward: float
) -> None:
    env = BlackjackEnv()
    await env.reset(seeded(0))
    env.player, env.dealer = list(player), list(dealer)
    result = await env.step("stand", {})
    assert (result.reward, result.terminated) == (reward, True)


@pytest.mark.parametrize(
    ("natural", "dealer", "reward"), [(True, (10, 10), 1.5), (True, (1, 10), 0.0), (False, (10, 10), 1.0)]
)
async def test_a_natural_gets_more_where_that_was_asked_for(
    natural: bool, dealer: tuple[int, ...], reward: float
) -> None:
    env = BlackjackEnv(natural=natural)
    await env.reset(seeded(0))
    env.player, env.dealer = [1, 10], list(dealer)
    assert (await env.step("stand", {})).reward == reward


async def test_blackjack_by_hand_over_many_seeds() -> None:
    """Played by an independent telling of the rules over the same cards."""
    for seed in range(200):
        env, cards = BlackjackEnv(), random.Random(seed)
        await env.reset(seeded(seed))
        dealer = [cards.choice(DECK), cards.choice(DECK)]
        player = [cards.choice(DECK), cards.choice(DECK)]
        result = StepResult()
        while _best(player) < 15:
            result = await env.step("hit", {})
            player.append(cards.choice(DECK))
        if _best(player) > 21:
            assert (result.reward, result.terminated) == (-1.0, True)
            continue
        result = await env.step("stand", {})
        while _best(dealer) < 17:
            dealer.append(cards.choice(DECK))
        mine, theirs = _best(player), 0 if _best(dealer) > 21 else _best(dealer)
        assert result.reward == (1.0 if mine > theirs else 0.0 if mine == theirs else -1.0)


def _best(hand: list[int]) -> int:
    sums = [sum(hand), *([sum(hand) + 10] if 1 in hand else [])]
    return max([value for value in sums if value <= 21], default=min(sums))


async def test_bisection_finds_the_number_and_turns_end() -> None:
    env = GuessingEnv(limit=100, turns=7)
    for seed in range(30):
        await env.reset(seeded(seed))
        low, high = 1, 100
        result = StepResult()
        while not result.done:
            middle = (low + high) // 2
            result = await env.step("guess", {"number": middle})
            low, high = (middle + 1, high) if "Higher" in result.observation else (low, middle - 1)
        assert (result.reward, result.terminated) == (1.0, True)
    await env.reset(seeded(1))
    results = [await env.step("guess", {"number": 0}) for _ in range(7)]
    assert [result.done for result in results] == [False] * 6 + [True]
    assert (results[-1].truncated, results[-1].terminated, results[-1].reward) == (True, False, 0.0)
    with pytest.raises(BadRequest, match="positive"):
        GuessingEnv(turns=0)


async def test_a_maze_can_be_walked_by_its_own_words() -> None:
    """Breadth first from copies of the episode would be cheating: a wall follower reads the observations."""
    for seed in range(10):
        env = MazeEnv(size=5, turns=500)
        result = await env.reset(seeded(seed))
        order, facing = list(MOVES), 1
        while not result.done:
            ways = result.observation.rsplit("Ways: ", 1)[1]
            turn = next(turn for turn in (1, 0, 3, 2) if order[(facing + turn) % 4] in ways)
            facing = (facing + turn) % 4
            result = await env.step("walk", {"direction": order[facing]})
        assert (result.reward, result.terminated) == (1.0, True)


async def test_walls_cost_turns_and_turns_end() -> None:
    env = MazeEnv(size=3, turns=4)
    await env.reset(seeded(0))
    results = deque([await env.step("walk", {"direction": "north"}) for _ in range(4)], maxlen=4)
    assert all("A wall." in result.observation for result in results)
    assert (results[-1].truncated, results[-1].reward) == (True, 0.0)
    with pytest.raises(BadRequest, match="size"):
        MazeEnv(size=1)


@pytest.mark.parametrize("natural", [False, True])
async def test_blackjack_beside_gymnasiums(natural: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cards to both: the same hands, ends and rewards. Theirs draws the player's first hand first."""
    theirs = pytest.importorskip("gymnasium.envs.toy_text.blackjack")
    cards: list[int] = []
    monkeypatch.setattr(theirs, "draw_card", lambda np_random: cards.pop())
    for seed in range(300):
        chance = random.Random(seed)
        deck = [chance.choice(DECK) for _ in range(60)]
        ours, peer = BlackjackEnv(natural=natural), theirs.BlackjackEnv(natural=natural)
        await ours.reset(seeded(seed))
        cards = list(deck)
        peer.reset()
        ours.player, ours.dealer = list(peer.player), list(peer.dealer)
        monkeypatch.setattr(ours, "_draw", list(cards).pop)
        done = False
        while not done:
            hit = hand_value(ours.player) < 17 and chance.random() < 0.9
            result = await ours.step("hit" if hit else "stand", {})
            _, reward, done, _, _ = peer.step(int(hit))
            assert (ours.player, ours.dealer, result.done) == (peer.player, peer.dealer, done)
            assert (result.reward or 0.0) == reward
