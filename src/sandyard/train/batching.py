"""From trajectories to padded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sandyard.errors import BadRequest
from sandyard.train.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """A scored trajectory and its advantage."""

    trajectory: Trajectory
    advantage: float

    @property
    def length(self) -> int:
        return len(self.trajectory.prompt_ids) + len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded. `input_ids` and `attention_mask` are [B, T]; `mask` and `old_logps` are [B, T-1] over
    the targets `input_ids[:, 1:]`, `mask` 1.0 where a token was sampled. `advantages` is [B]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    mask: torch.Tensor
    old_logps: torch.Tensor
    advantages: torch.Tensor


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Pad samples into a batch. Raises `BadRequest` for a trajectory whose ids, mask and log-probs are not
    of one length."""
    width = max(sample.length for sample in samples)
    ids = torch.zeros((len(samples), width), dtype=torch.long)
    attention = torch.zeros((len(samples), width), dtype=torch.long)
    mask = torch.zeros((len(samples), width))
    logps = torch.zeros((len(samples), width))
    for row, sample in enumerate(samples):
        record = sample.trajectory
        if not len(record.token_ids) == len(record.mask) == len(record.logprobs):
            raise BadRequest(f"trajectory of {record.task_id}: ids, mask and log-probs are not aligned")
        start, end = len(record.prompt_ids), sample.length
        ids[row, :end] = torch.tensor([*record.prompt_ids, *record.token_ids])
        attention[row, :end] = 1
        mask[row, start:end] = torch.tensor(record.mask, dtype=torch.float32)
        logps[row, start:end] = torch.tensor(record.logprobs)
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    tensors = (ids, attention, mask[:, 1:], logps[:, 1:], advantages)
    return Batch(*(tensor.to(device) for tensor in tensors))


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Split into runs of like length whose padded size stays under `max_tokens` (one sample at least)."""
    part: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: sample.length):
        if part and (len(part) + 1) * sample.length > max_tokens:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part
