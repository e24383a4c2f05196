"""What a training step reports: policy health as pure functions on tensors, and the step's aggregate.

The names are a contract with those who plot them. Over rollouts that were scored:
`train/code_acc` (all tests passed), `train/test_pass_rate`, `train/avg_reward`, `train/submit_rate`,
`train/num_turns`, `train/tool_error_rate` (calls that could not be made, of all calls),
`train/completion_length` (sampled tokens), `train/truncated`. `train/masked` counts the rest, by
reason in `train/masked/REASON`; `train/groups_degenerate` counts groups. `env/failures` counts these and
the tries that were given up for a fresh sandbox, again by reason. `train/entropy`, `train/kl`,
`train/clip_ratio` and `train/ratio_mean` are over the rollouts that the gradient was computed on: with
beta 0, those of an advantage other than zero. `time/sync` is 0 where the weights that sample are those
that train. `NAMES` are all that a step can have a value of; one that it has none of (no update, nothing
scored, no tool call) is null in the log.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from sandyard.train.losses import LossConfig, k3, ratios
from sandyard.train.trajectory import Trajectory

Metrics = dict[str, float]
NAMES = (
    "train/code_acc", "train/test_pass_rate", "train/avg_reward", "train/submit_rate", "train/num_turns",
    "train/tool_error_rate", "train/completion_length", "train/truncated", "train/masked",
    "train/groups_degenerate", "train/clip_ratio", "train/kl", "train/entropy", "train/grad_norm",
    "train/ratio_mean", "time/rollout", "time/env_wait", "time/generate", "time/train", "time/sync",
    "env/create_p50", "env/exec_p50", "env/failures",
)  # fmt: skip
# Seconds under which a tool did not leave the process (bookkeeping, such as submitting): no execution.
_LOCAL = 0.001


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over positions where `mask` is 1; 0.0 if there are none."""
    return float((values * mask).sum() / mask.sum().clamp(min=1.0))


def clip_ratio(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: LossConfig) -> float:
    """Share of sampled tokens whose gradient the loss cuts, with the loss's own epsilons: below
    `1 - epsilon` with a negative advantage, or above `1 + epsilon_high` with a positive one."""
    sign = advantages[:, None]
    low = (ratio < 1 - config.epsilon) & (sign < 0)
    high = (ratio > 1 + config.high) & (sign > 0)
    return masked_mean((low | high).float(), mask)


@torch.no_grad()
def policy_health(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    entropy: torch.Tensor,
    config: LossConfig,
    ref_logps: torch.Tensor | None = None,
) -> Metrics:
    """`train/kl` is k3 to the reference policy, or without one to the policy that sampled."""
    ratio = ratios(logps, old_logps)
    return {
        "train/clip_ratio": clip_ratio(ratio, advantages, mask, config),
        "train/kl": masked_mean(k3(logps, old_logps if ref_logps is None else ref_logps), mask),
        "train/entropy": masked_mean(entropy, mask),
        "train/ratio_mean": masked_mean(ratio, mask),
    }


def weighted_mean(parts: Sequence[tuple[float, Metrics]]) -> Metrics:
    """Mean of each metric over (weight, metrics) pairs with the same keys; {} if there are none."""
    total = sum(weight for weight, _ in parts)
    if not parts or total <= 0:
        return {}
    return {key: sum(weight * metrics[key] for weight, metrics in parts) / total for key in parts[0][1]}


def rollout_metrics(trajectories: Sequence[Trajectory], degenerate_groups: int) -> Metrics:
    """The `train/*` and `env/*` figures of one batch. With no scored rollout the means are left out: there
    is nothing they would be the mean of."""
    scored = [t for t in trajectories if t.reward is not None]
    reasons = Counter(t.masked for t in trajectories if t.masked is not None)
    failures = reasons + Counter(reason for t in trajectories for reason in t.failures)
    metrics: Metrics = {
        "train/masked": float(sum(reasons.values())),
        "train/groups_degenerate": float(degenerate_groups),
        "env/failures": float(failures.total()),
        **{f"train/masked/{reason}": float(count) for reason, count in sorted(reasons.items())},
        **{f"env/failures/{reason}": float(count) for reason, count in sorted(failures.items())},
        **_percentile("env/create_p50", (t.timings.create for t in trajectories if t.timings.create > 0)),
        **_percentile("env/exec_p50", (c.seconds for t in trajectories for c in t.calls if c.seconds > _LOCAL)),
    }
    if not scored:
        return metrics
    calls = sum(len(t.calls) for t in scored)
    return metrics | {
        "train/code_acc": _mean(t.solved for t in scored),
        "train/test_pass_rate": _mean(_pass_rate(t) for t in scored),
        "train/avg_reward": _mean(t.reward or 0.0 for t in scored),
        "train/submit_rate": _mean(t.submission is not None for t in scored),
        "train/num_turns": _mean(t.turns for t in scored),
        "train/tool_error_rate": sum(t.tool_errors for t in scored) / max(1, calls),
        "train/completion_length": _mean(t.sampled_tokens for t in scored),
        "train/truncated": _mean(t.truncated for t in scored),
        "time/generate": _mean(t.timings.generate for t in trajectories),
        "time/env_wait": _mean(t.timings.create + t.timings.env for t in trajectories),
    }


def _pass_rate(trajectory: Trajectory) -> float:
    verdict = trajectory.verdict
    return verdict.passed / verdict.total if verdict and verdict.total else 0.0


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(float(value) for value in values)


def _percentile(name: str, values: Iterable[float]) -> Metrics:
    found = list(values)
    return {name: statistics.median(found)} if found else {}
