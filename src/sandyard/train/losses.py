"""The clipped policy-gradient losses, as pure functions on tensors.

Sources: GRPO (Shao et al. 2024), DAPO (Yu et al. 2025: token mean, `epsilon_high`), Dr. GRPO (Liu et al.
2025: constant length normaliser), KL estimator k3 (Schulman 2020). Normalisation and the optional
KL-times-ratio follow TRL 1.16, against which the tests prove loss and gradient.

Tensors are [B, T] over completion positions: `logps` of the trained policy (with gradient), `old_logps`
as sampled, `mask` 1 where a token was sampled. `advantages` is [B].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sandyard.errors import ConfigError

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")


@dataclass(frozen=True, slots=True)
class LossConfig:
    """`epsilon_high` None: as `epsilon`. `kl_times_ratio` multiplies the KL term by the importance ratio
    (TRL's `use_bias_correction_kl`, its default). `max_completion_length` is Dr. GRPO's constant."""

    loss_type: str = "grpo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kl_times_ratio: bool = True
    max_completion_length: int = 256

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss_type {self.loss_type!r} is unknown", remedy=f"use one of {', '.join(LOSS_TYPES)}")
        if not 0 < self.epsilon < 1 or not 0 < self.high < math.inf:
            raise ConfigError("epsilon must lie in (0, 1) and epsilon_high above 0")
        if not 0 <= self.beta < math.inf:
            raise ConfigError(f"beta is {self.beta}, must be a finite number, 0 or above")

    @property
    def high(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


def ratios(logps: torch.Tensor, old_logps: torch.Tensor) -> torch.Tensor:
    """Importance ratio of every token."""
    return torch.exp(logps - old_logps)


def k3(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference): exp(d) - d - 1 with d = ref - policy. Never negative."""
    difference = ref_logps - logps
    return torch.exp(difference) - difference - 1


def token_losses(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
    ref_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of every token, [B, T], before masking and normalisation.

    Raises `ConfigError` if `beta` is above 0 and there is no reference.
    """
    ratio = ratios(logps, old_logps)
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.high)
    loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    if config.beta == 0.0:
        return loss
    if ref_logps is None:
        raise ConfigError("beta above 0 needs the reference policy's log-probs")
    kl = k3(logps, ref_logps)
    return loss + config.beta * (kl * ratio if config.kl_times_ratio else kl)


def normalizer(mask: torch.Tensor, config: LossConfig) -> float:
    """What `loss_sum` over a whole batch is divided by: sequences (grpo), sampled tokens (dapo), or
    sequences x `max_completion_length` (dr_grpo)."""
    if config.loss_type == "grpo":
        return float(max(1, mask.shape[0]))
    if config.loss_type == "dapo":
        return max(1.0, float(mask.sum()))
    return float(max(1, mask.shape[0]) * config.max_completion_length)


def loss_sum(token_loss: torch.Tensor, mask: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """The numerator: sum of per-sequence token means (grpo), or of all tokens. Sums over micro-batches
    divided by the batch's `normalizer` accumulate to the exact loss of the batch."""
    masked = token_loss * mask
    if config.loss_type == "grpo":
        return (masked.sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)).sum()
    return masked.sum()


def policy_loss(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: LossConfig,
    ref_logps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scalar loss of one whole batch."""
    tokens = token_losses(logps, old_logps, advantages, config, ref_logps)
    return loss_sum(tokens, mask, config) / normalizer(mask, config)
