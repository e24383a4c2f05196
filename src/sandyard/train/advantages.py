"""Group-relative advantages (Shao et al. 2024, DeepSeekMath, eq. for outcome supervision; TRL 1.16's scaling)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from sandyard.errors import BadRequest

EPSILON = 1e-4  # TRL's
SCALES = ("group", "batch", "none")
# Rewards this close are one reward: what is left is rounding, and dividing by it would train on noise.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Advantages:
    """One value per rollout, in order; exactly 0.0 for masked rollouts and in groups without a contrast.

    `degenerate` counts the groups with fewer than two scored rollouts or with equal rewards only."""

    values: list[float]
    degenerate: int


def group_advantages(
    rewards: Sequence[float | None],
    num_generations: int,
    scale: str = "group",
    *,
    keys: Sequence[Hashable] | None = None,
    epsilon: float = EPSILON,
) -> Advantages:
    """`(r - mean of its group) / (std + epsilon)`, in float64.

    The `num_generations` rollouts of a group are contiguous. A reward of None is a masked rollout: it is
    left out of mean and std. The std is the unbiased one (n - 1), as in TRL 1.16: of the group for
    `scale` "group", of all scored rewards for "batch"; "none" does not divide. `keys` (one per rollout,
    such as task ids) asserts the layout: each group must have one key.

    Raises `BadRequest` for an unknown scale, a length that is no multiple of `num_generations`, a
    non-finite reward, or a group of mixed keys.
    """
    _check(rewards, num_generations, scale, keys)
    scored = [reward for reward in rewards if reward is not None]
    batch_std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    values: list[float] = []
    degenerate = 0
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        known = [reward for reward in group if reward is not None]
        if len(known) < 2 or _spread(known) <= _SAME:
            degenerate += 1
            values += [0.0] * len(group)
            continue
        mean = statistics.fmean(known)
        std = {"group": statistics.stdev(known), "batch": batch_std}.get(scale)
        divisor = 1.0 if std is None else std + epsilon
        values += [0.0 if reward is None else (reward - mean) / divisor for reward in group]
    return Advantages(values, degenerate)


def _spread(known: Sequence[float]) -> float:
    scale = max(1.0, *(abs(reward) for reward in known))
    return (max(known) - min(known)) / scale


def _check(rewards: Sequence[float | None], num_generations: int, scale: str, keys: Sequence[Hashable] | None) -> None:
    if scale not in SCALES:
        raise BadRequest(
            f"advantage scale {scale!r} is unknown", field="scale", remedy=f"use one of {', '.join(SCALES)}"
        )
    if num_generations < 1 or len(rewards) % num_generations:
        raise BadRequest(f"{len(rewards)} rewards are not groups of {num_generations}", field="num_generations")
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise BadRequest(f"reward {index} is {reward}: a rollout without a reward is None", field="rewards")
    if keys is None:
        return
    for start in range(0, len(rewards), num_generations):
        group = set(keys[start : start + num_generations])
        if len(group) != 1 or len(keys) != len(rewards):
            raise BadRequest(f"group {start // num_generations} mixes tasks {group}: the layout is wrong", field="keys")
