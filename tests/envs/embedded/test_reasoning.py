"""Puzzles of the real reasoning-gym."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from sandyard.envs.base import StepStatus
from sandyard.envs.embedded.reasoning import ReasoningEnv
from sandyard.errors import BadRequest, ConfigError, VerifierError
from sandyard.tasks.base import Task


def seeded(seed: int) -> Task:
    return Task("t", "", metadata={"seed": seed})


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "caesar_cipher", "word_sorting"])
async def test_the_right_answer_earns_what_the_data_set_says(dataset: str) -> None:
    for seed in range(5):
        env = ReasoningEnv(dataset)
        first = await env.reset(seeded(seed))
        again = ReasoningEnv(dataset)
        assert (await again.reset(seeded(seed))).observation == first.observation
        result = await env.step("answer", {"answer": env._entry["answer"]})
        assert (result.reward, result.terminated, env.submission) == (1.0, True, env._entry["answer"])
        wrong = await again.step("answer", {"answer": "certainly not this"})
        assert wrong.reward is not None
        assert wrong.reward < 1.0
        assert (await env.step("answer", {"answer": "more"})).status is StepStatus.INVALID_CALL


async def test_seeds_give_different_puzzles_and_options_reach_the_data_set() -> None:
    env = ReasoningEnv("chain_sum", min_terms=6, max_terms=6)
    texts = [(await env.reset(seeded(seed))).observation for seed in range(8)]
    assert len(set(texts)) == 8
    assert all(sum(text.count(sign) for sign in "+-") == 5 for text in texts)


@pytest.mark.parametrize(
    ("dataset", "options", "why"),
    [("nope", {}, "'nope'"), ("chain_sum", {"nonsense": 1}, "nonsense"), ("chain_sum", {"min_terms": 0}, "min_terms")],
)
def test_what_it_does_not_know_is_refused(dataset: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        ReasoningEnv(dataset, **options)


async def test_a_scorer_that_runs_the_answer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cheat = "__import__('builtins').print('it ran here')"
    for dataset in ("countdown", "puzzle24"):
        with pytest.raises(BadRequest, match="evaluating it as code"):
            ReasoningEnv(dataset)
    env = ReasoningEnv("countdown", trust_scorer=True)
    await env.reset(seeded(0))
    await env.step("answer", {"answer": cheat})
    assert "it ran here" in capsys.readouterr().out  # which is why


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file that a data set of the library leaves open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_most_data_sets_can_be_played_and_none_runs_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAN", raising=False)
    refused = {}
    for dataset in DATASETS:
        try:
            env = ReasoningEnv(dataset)
        except BadRequest as error:
            refused[dataset] = str(error)
            continue
        await env.reset(seeded(1))
        result = await env.step("answer", {"answer": "__import__('os').environ.__setitem__('RAN', '1')"})
        assert result.reward is not None, dataset
        # One asks for a yes or no and takes whatever is no yes for a no.
        assert 0 <= result.reward < 1 or dataset == "game_of_life_halting", dataset
        assert "RAN" not in os.environ, dataset
    assert len(DATASETS) - len(refused) > 80, refused
    assert all("evaluating" in why for name, why in refused.items() if name != "composite"), refused


def test_a_composite_of_such_data_sets_is_refused_too() -> None:
    parts = [reasoning_gym.composite.DatasetSpec(name="countdown", weight=1, config={})]
    with pytest.raises(BadRequest, match="evaluating it as code"):
        ReasoningEnv("composite", datasets=parts)


@pytest.mark.parametrize(
    ("dataset", "answer"), [("prime_factorization", "nan"), ("boxnet", "[1]"), ("coin_flip", "1e999")]
)
async def test_an_answer_that_a_scorer_chokes_on_is_a_wrong_one(dataset: str, answer: str) -> None:
    """Else a policy that fears a low score would have itself left out of its group."""
    env = ReasoningEnv(dataset)
    await env.reset(seeded(1))
    result = await env.step("answer", {"answer": answer})
    assert (result.reward, result.terminated) == (0.0, True)


@pytest.mark.parametrize("outcome", [float("nan"), ZeroDivisionError("x")])
async def test_a_scorer_that_fails_on_its_own_answer_is_not_the_policys_doing(
    outcome: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*_: object) -> object:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    env = ReasoningEnv("chain_sum")
    await env.reset(seeded(0))
    monkeypatch.setattr(env._puzzles, "score_answer", score)
    with pytest.raises(VerifierError, match="chain_sum"):
        await env.step("answer", {"answer": "1"})


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"sandyard\[games\]"):
        ReasoningEnv("chain_sum")
    assert reasoning_gym is not None
