"""The frozen policy that the KL term compares with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sandyard.errors import ConfigError
from sandyard.train.policies.base import Policy
from sandyard.train.policies.transformers import TransformersPolicy, model_logprobs
from sandyard.train.update import Reference


def freeze_reference(policy: Policy, temperature: float) -> Reference:
    """Log-probs of the policy as it is now, for as long as the run lasts.

    A full copy of the weights; with LoRA the same model with its adapters off, which costs nothing.
    Raises `ConfigError` for a policy whose model cannot be copied.
    """
    if not isinstance(policy, TransformersPolicy):
        raise ConfigError("beta above 0 needs a transformers policy to freeze", remedy="use --beta 0")
    if hasattr(policy.model, "disable_adapter"):
        return _adapter_off(policy.model, temperature)
    frozen = copy.deepcopy(policy.model).requires_grad_(False).eval()
    return _of(frozen, temperature)


def _of(model: Any, temperature: float) -> Reference:
    @torch.no_grad()
    def reference(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return model_logprobs(model, input_ids, attention_mask, temperature)[0]

    return reference


def _adapter_off(model: Any, temperature: float) -> Reference:
    plain = _of(model, temperature)

    def reference(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        with model.disable_adapter():
            return plain(input_ids, attention_mask)

    return reference
