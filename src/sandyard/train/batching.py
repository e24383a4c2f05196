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
    """`prompts` and `completions` are token ids of B rows. `mask` and `old_logps` are [B, C] over the
    completions, right-padded to the longest, `mask` 1.0 where a token was sampled. `advantages` is [B]."""

    prompts: list[list[int]]
    completions: list[list[int]]
    mask: torch.Tensor
    old_logps: torch.Tensor
    advantages: torch.Tensor


def collate(samples: Sequence[Sample], device: torch.device | str = "cpu") -> Batch:
    """Put samples together. Raises `BadRequest` for a trajectory whose ids, mask and log-probs are not of
    one length."""
    width = max(len(sample.trajectory.token_ids) for sample in samples)
    mask = torch.zeros((len(samples), width))
    logps = torch.zeros((len(samples), width))
    for row, sample in enumerate(samples):
        record = sample.trajectory
        if not len(record.token_ids) == len(record.mask) == len(record.logprobs):
            raise BadRequest(f"trajectory of {record.task_id}: ids, mask and log-probs are not aligned")
        mask[row, : len(record.mask)] = torch.tensor(record.mask, dtype=torch.float32)
        logps[row, : len(record.mask)] = torch.tensor(record.logprobs)
    return Batch(
        prompts=[sample.trajectory.prompt_ids for sample in samples],
        completions=[sample.trajectory.token_ids for sample in samples],
        mask=mask.to(device),
        old_logps=logps.to(device),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32, device=device),
    )


def micro_batches(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    """Split into parts whose padded size stays under `max_tokens` (one sample at least). Rollouts of one
    prompt stay together, so that it is computed once."""

    def order(sample: Sample) -> tuple[int, list[int], int]:
        record = sample.trajectory
        return len(record.prompt_ids), record.prompt_ids, len(record.token_ids)

    part: list[Sample] = []
    for sample in sorted(samples, key=order):
        if part and padded_tokens([*part, sample]) > max_tokens:
            yield part
            part = []
        part.append(sample)
    if part:
        yield part


def padded_tokens(samples: Sequence[Sample]) -> int:
    """Positions that go through the model: every distinct prompt once, every completion padded."""
    records = [sample.trajectory for sample in samples]
    prompts = {(record.group, tuple(record.prompt_ids)) for record in records}
    longest_prompt = max(len(record.prompt_ids) for record in records)
    return len(prompts) * longest_prompt + len(records) * max(len(record.token_ids) for record in records)
