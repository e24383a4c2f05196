"""The optimizer's side of a step: losses of micro-batches, gradient, clip, AdamW."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from sandyard.errors import SandyardError
from sandyard.train.batching import Batch, Sample, collate, micro_batches
from sandyard.train.config import TrainConfig
from sandyard.train.losses import LossConfig, loss_sum, token_losses
from sandyard.train.metrics import Metrics, policy_health, weighted_mean
from sandyard.train.policies.base import Policy
from sandyard.train.policies.completions import plain_logprobs
from sandyard.train.policies.transformers import TransformersPolicy
from sandyard.train.seeds import derive_seed

Rows = Sequence[Sequence[int]]
Reference = Callable[[Rows, Rows], torch.Tensor]  # (prompts, completions) → log-probs [B, C], no gradient


class Updater:
    """Owns the optimizer over the policy's parameters.

    `reference` gives the frozen policy's log-probs; needed when `beta` is above 0.
    """

    def __init__(self, policy: Policy, config: TrainConfig, reference: Reference | None = None) -> None:
        self._policy = policy
        self._config = config
        self._loss = config.loss()
        self._reference = reference
        self._parameters = list(policy.parameters())
        self._micro_tokens = min(config.micro_tokens, getattr(policy, "batch_tokens", config.micro_tokens))
        self.optimizer = torch.optim.AdamW(self._parameters, lr=config.learning_rate, weight_decay=config.weight_decay)

    def update(self, samples: Sequence[Sample], step: int) -> Metrics:
        """`num_epochs` passes over `samples` (scored ones only); metrics are means over all of them.

        Blocking: run it in a thread. Raises `SandyardError` for a gradient that is not finite; the weights
        are then as before that optimizer step.
        """
        parts: list[tuple[float, Metrics]] = []
        norms: list[float] = []
        for epoch in range(self._config.num_epochs):
            order = list(samples)
            random.Random(derive_seed("minibatches", self._config.seed, step, epoch)).shuffle(order)
            size = self._config.minibatch or len(order)
            for start in range(0, len(order), size):
                parts += self._accumulate(order[start : start + size])
                norms.append(self._apply())
        return {**weighted_mean(parts), "train/grad_norm": sum(norms) / len(norms)}

    def _accumulate(self, samples: Sequence[Sample]) -> list[tuple[float, Metrics]]:
        """Add up the gradient of one optimizer step; (sampled tokens, metrics) of each micro-batch."""
        divisor = _divisor(samples, self._loss)
        # Without a KL term a rollout of advantage 0 has no gradient: it counts in the divisor, and that is all.
        active = [s for s in samples if s.advantage != 0.0 or self._loss.beta > 0.0]
        return [self._backward(part, divisor) for part in micro_batches(active, self._micro_tokens)]

    def _backward(self, samples: Sequence[Sample], divisor: float) -> tuple[float, Metrics]:
        batch = collate(samples, self._parameters[0].device)
        logps, entropy = self._logprobs(batch.prompts, batch.completions)
        reference = self._reference_logps(batch)
        tokens = token_losses(logps, batch.old_logps, batch.advantages, self._loss, reference)
        loss = loss_sum(tokens, batch.mask, self._loss) / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        health = policy_health(logps, batch.old_logps, batch.advantages, batch.mask, entropy, self._loss, reference)
        weight = float(batch.mask.sum())
        return weight, health

    def _reference_logps(self, batch: Batch) -> torch.Tensor | None:
        if self._loss.beta == 0.0 or self._reference is None:
            return None
        return self._reference(batch.prompts, batch.completions)

    def _logprobs(self, prompts: Rows, completions: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        temperature = self._config.temperature
        if isinstance(self._policy, TransformersPolicy):
            return self._policy.completion_logprobs(prompts, completions, temperature)
        return plain_logprobs(self._policy, prompts, completions, temperature)

    def _apply(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise SandyardError(f"the gradient's norm is {norm}", remedy="lower --learning-rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def _divisor(samples: Sequence[Sample], config: LossConfig) -> float:
    """`losses.normalizer` of a batch that is never put into one tensor."""
    if config.loss_type == "dapo":
        return max(1.0, float(sum(sample.trajectory.sampled_tokens for sample in samples)))
    if config.loss_type == "grpo":
        return float(len(samples))
    return float(len(samples) * config.max_completion_length)
