"""The frozen policy that the KL term compares with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sandyard.errors import ConfigError
from sandyard.train.policies.base import Policy
from sandyard.train.policies.completions import shared_logprobs
from sandyard.train.policies.transformers import TransformersPolicy
from sandyard.train.update import Reference, Rows


def freeze_reference(policy: Policy, temperature: float) -> Reference:
    """Log-probs of the policy as it is now, for as long as the run lasts.

    A full copy of the weights; with LoRA the same model with its adapters off, which costs nothing.
    Raises `ConfigError` for a policy whose model cannot be copied.
    """
    if not isinstance(policy, TransformersPolicy):
        raise ConfigError("beta above 0 needs a transformers policy to freeze", remedy="use --beta 0")
    if hasattr(policy.model, "disable_adapter"):
        return _adapter_off(policy, temperature)
    frozen = copy.deepcopy(policy.base_model).requires_grad_(False).eval()
    return _of(frozen, policy.cache_argument, temperature)


def _of(model: Any, cache_argument: str, temperature: float) -> Reference:
    @torch.no_grad()
    def reference(prompts: Rows, completions: Rows) -> torch.Tensor:
        return shared_logprobs(model, cache_argument, prompts, completions, temperature)[0]

    return reference


def _adapter_off(policy: TransformersPolicy, temperature: float) -> Reference:
    plain = _of(policy.base_model, policy.cache_argument, temperature)

    def reference(prompts: Rows, completions: Rows) -> torch.Tensor:
        with policy.model.disable_adapter():
            return plain(prompts, completions)

    return reference
