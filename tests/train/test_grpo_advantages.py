from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandyard.errors import BadRequest
from sandyard.train.advantages import group_advantages

rewards = st.lists(st.one_of(st.none(), st.floats(-1, 1)), min_size=8, max_size=8)


@pytest.mark.parametrize(("reward", "count"), [(0.1, 8), (0.7, 7), (1 / 3, 8), (1e-8, 5), (1e6 / 3, 8)])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(reward: float, count: int, scale: str) -> None:
    result = group_advantages([reward] * count, count, scale)
    assert result.values == [0.0] * count
    assert result.degenerate == 1


def test_rewards_equal_up_to_rounding_are_equal() -> None:
    assert group_advantages([0.1 + 0.2, 0.3], 2).values == [0.0, 0.0]


def test_known_values() -> None:
    values = group_advantages([1.0, 0.0, 0.0, 0.0], 4).values
    std = statistics.stdev([1.0, 0, 0, 0])
    assert values == pytest.approx([0.75 / (std + 1e-4)] + [-0.25 / (std + 1e-4)] * 3)
    assert group_advantages([1.0, 0.0], 2, "none").values == [0.5, -0.5]


def test_batch_scale_divides_by_the_std_of_all() -> None:
    rewards = [1.0, 0.0, 0.5, 0.5]
    result = group_advantages(rewards, 2, "batch")
    std = statistics.stdev(rewards)
    assert result.values == pytest.approx([0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0, 0])
    assert result.values[2:] == [0.0, 0.0]


def test_matches_trl_in_float64() -> None:
    from trl.trainer.utils import nanstd

    raw = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    raw[1, 2] = torch.nan
    expected = torch.nan_to_num((raw - raw.nanmean(1, keepdim=True)) / (nanstd(raw, dim=1, keepdim=True) + 1e-4))
    flat = [None if math.isnan(value) else value for value in raw.flatten().tolist()]
    assert group_advantages(flat, 6).values == pytest.approx(expected.flatten().tolist())


def test_a_masked_rollout_is_left_out() -> None:
    with_mask = group_advantages([1.0, None, 0.0], 3).values
    assert with_mask == [*group_advantages([1.0, 0.0], 2).values[:1], 0.0, *group_advantages([1.0, 0.0], 2).values[1:]]


@pytest.mark.parametrize("group", [[None, None], [None, 1.0]])
def test_fewer_than_two_scored_is_degenerate(group: list[float | None]) -> None:
    result = group_advantages([*group, 1.0, 0.0], 2)
    assert result.values[:2] == [0.0, 0.0]
    assert result.degenerate == 1


@given(rewards)
def test_advantages_of_a_group_sum_to_zero_and_are_finite(group: list[float | None]) -> None:
    values = group_advantages(group, 8).values
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(value) for value in values)
    assert all(value == 0.0 for value, reward in zip(values, group, strict=True) if reward is None)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_finite_is_refused(reward: float) -> None:
    with pytest.raises(BadRequest, match="reward 1"):
        group_advantages([0.0, reward], 2)


def test_unknown_scale_wrong_length_and_wrong_layout_are_refused() -> None:
    with pytest.raises(BadRequest, match="'std' is unknown"):
        group_advantages([0.0, 1.0], 2, "std")
    with pytest.raises(BadRequest, match="groups of 2"):
        group_advantages([0.0, 1.0, 1.0], 2)
    with pytest.raises(BadRequest, match="layout"):
        group_advantages([0.0, 1.0, 1.0, 0.0], 2, keys=["a", "b", "a", "b"])
