"""Demonstrations, the warm start and its cache."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sandyard.errors import ConfigError
from sandyard.tasks.builtin import builtin_tasks
from sandyard.train.nano.cache import atomic_directory, content_key
from sandyard.train.nano.demonstrations import (
    SUBMIT_TOOL,
    DemonstrationConfig,
    demonstrate,
    demonstrations,
    system_prompt,
)
from sandyard.train.nano.measure import is_reference
from sandyard.train.nano.warmstart import WarmStartConfig, warm_start
from sandyard.train.policies.loading import load_policy
from sandyard.train.policies.nano import load_nano

TRAIN, HELD_OUT = builtin_tasks("train"), builtin_tasks("heldout")
TINY = WarmStartConfig(steps=2, batch_size=2, extra_rounds=0, samples=1)


def test_demonstrations_are_right_about_as_often_as_asked() -> None:
    config = DemonstrationConfig(right=0.4, tries_first=0.2)
    shown = list(itertools.islice(demonstrations(TRAIN, 0, config), 2000))
    two_turns = sum(len(messages) > 3 for messages in shown) / len(shown)
    assert 0.16 < two_turns < 0.24
    names = {messages[-1]["tool_calls"][0]["function"]["name"] for messages in shown}
    assert names == {SUBMIT_TOOL}


@pytest.mark.parametrize(("right", "expected"), [(1.0, True), (0.0, False)])
def test_a_demonstration_keeps_name_and_number_and_differs_in_the_operation(right: float, expected: bool) -> None:
    rng = random.Random(0)
    for task in TRAIN[::7]:
        messages = demonstrate(task, rng, DemonstrationConfig(right=right, tries_first=0.0))
        code = messages[-1]["tool_calls"][0]["function"]["arguments"]["code"]
        function = code.split("(")[0].removeprefix("def ")
        renamed = code.replace(function, task.metadata["function"])
        assert is_reference(renamed, task) is expected
        assert str(task.metadata["parameter"]) in code
        assert function in messages[1]["content"]


def test_demonstrations_never_show_a_held_out_pair() -> None:
    held_out = {(task.family, task.metadata["parameter"]) for task in HELD_OUT}
    assert not held_out & {(task.family, task.metadata["parameter"]) for task in TRAIN}


def test_the_system_prompt_tells_the_number_of_turns() -> None:
    assert "You have 7 turns." in system_prompt(7)


def test_is_reference_needs_the_same_program_and_never_runs_it() -> None:
    task = HELD_OUT[0]
    assert task.reference is not None
    assert is_reference(task.reference + "\nprint(1)", task)
    assert is_reference(task.reference.replace("    ", "  "), task)
    assert not is_reference("raise SystemExit", task)
    assert not is_reference("def broken(:", task)
    assert not is_reference("\0", task)


def test_a_warm_start_is_the_same_for_the_same_seed_and_loads_again(tmp_path: Path) -> None:
    first, report = warm_start(TRAIN, HELD_OUT[:4], TINY)
    second, _ = warm_start(TRAIN, HELD_OUT[:4], TINY)
    other, _ = warm_start(TRAIN, HELD_OUT[:4], replace(TINY, seed=1))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.parameters()[0], other.parameters()[0])
    assert report.steps == 2
    assert not report.in_window  # two steps teach nothing, and it says so
    assert 1e6 <= sum(p.numel() for p in first.parameters()) <= 3e6
    first.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), loaded.parameters(), strict=True))


def test_a_policy_out_of_the_window_is_trained_further() -> None:
    seen: list[tuple[int, int]] = []
    config = replace(TINY, steps=3, extra_rounds=2)
    _, report = warm_start(TRAIN, HELD_OUT[:2], config, lambda step, of, loss: seen.append((step, of)))
    assert seen == [(3, 3), (1, 1), (1, 1)]
    assert report.steps in (3, 4, 5)


def test_the_cache_is_used_until_something_changes(tmp_path: Path) -> None:
    made = load_nano(TINY, train=TRAIN, held_out=HELD_OUT[:2], cache=tmp_path)
    again = load_nano(TINY, train=TRAIN, held_out=HELD_OUT[:2], cache=tmp_path)
    assert (made.cached, again.cached) == (False, True)
    assert again.report == made.report
    assert all(torch.equal(a, b) for a, b in zip(made.policy.parameters(), again.policy.parameters(), strict=True))
    (made.directory / "model.safetensors").unlink()
    assert not load_nano(TINY, train=TRAIN, held_out=HELD_OUT[:2], cache=tmp_path).cached


def test_the_key_follows_settings_and_tasks() -> None:
    keys = {
        content_key(TINY, TRAIN, HELD_OUT),
        content_key(replace(TINY, steps=3), TRAIN, HELD_OUT),
        content_key(TINY, TRAIN[1:], HELD_OUT),
        content_key(TINY, builtin_tasks("train", seed=1), HELD_OUT),
    }
    assert len(keys) == 4
    assert content_key(TINY, TRAIN, HELD_OUT) in keys


def test_a_directory_that_fails_to_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_directory(tmp_path / "entry") as work:
            (work / "half").write_text("x")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        WarmStartConfig(window=(0.5, 0.2))
