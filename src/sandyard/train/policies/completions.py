"""Log-probs of completions whose prompts repeat: each distinct prompt goes through the model once.

The rollouts of a group share their prompt, which is often longer than what was sampled. The prompt's
keys and values are computed once, repeated for the rows that need them, and carry the gradient of all.
The result is that of the plain forward pass, up to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sandyard.train.policies.kvcache import PrefillCache

Ids = Sequence[int]


def shared_logprobs(
    model: Any, cache_argument: str, prompts: Sequence[Ids], completions: Sequence[Ids], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [B, C] of the completions' tokens with gradient, entropy [B, C] without), in float32, of
    softmax(logits / temperature). C is the longest completion; what lies after a shorter one is padding.

    `model` is a transformers decoder whose forward takes its cache as `cache_argument`."""
    device = model.device
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    where = {prompt: row for row, prompt in enumerate(distinct)}
    index = torch.tensor([where[tuple(prompt)] for prompt in prompts], device=device)
    prompt_ids, prompt_valid = (tensor.to(device) for tensor in _pad(distinct, left=True))
    ids, valid = (tensor.to(device) for tensor in _pad(completions, left=False))

    cache = PrefillCache(None)
    # Of a prompt only the last logits are wanted; a large vocabulary makes the others expensive.
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    first = _forward(model, prompt_ids, prompt_valid, {cache_argument: cache, **keep})[:, -1]
    past = torch.stack(cache.new, dim=1).index_select(2, index)  # [2, layers, B, heads, P, dim]
    seen = torch.cat((prompt_valid[index], valid), dim=1)
    rest = _forward(model, ids, seen, {cache_argument: PrefillCache(past)})[:, :-1]
    logits = torch.cat((first[index][:, None], rest), dim=1).float() / temperature
    logps = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(dim=-1)
    return logps.gather(2, ids[:, :, None])[:, :, 0], entropy


def plain_logprobs(
    policy: Any, prompts: Sequence[Ids], completions: Sequence[Ids], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by `policy.logprobs` alone, for policies of any kind."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    ids, valid = _pad(rows, left=False)
    logps, entropy = policy.logprobs(ids, valid.long(), temperature)
    width = max(len(completion) for completion in completions)
    starts = torch.tensor([[len(prompt) - 1] for prompt in prompts])
    columns = (starts + torch.arange(width)).clamp(max=logps.shape[1] - 1).to(logps.device)
    return logps.gather(1, columns), entropy.gather(1, columns)


def _forward(model: Any, ids: torch.Tensor, valid: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Logits [B, T, vocabulary] of `ids`, which are the last T columns of `valid`."""
    width, past = ids.shape[1], valid.shape[1] - ids.shape[1]
    positions = (valid.long().cumsum(1) - 1).clamp(min=0)[:, past:]
    causal = torch.ones((width, past + width), dtype=torch.bool, device=ids.device).tril(past)
    hidden = ~(valid[:, None, None, :] & causal)
    mask = hidden.to(model.dtype) * torch.finfo(model.dtype).min
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **arguments)
    logits: torch.Tensor = output.logits
    return logits


def _pad(rows: Sequence[Ids], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, is it a token) of rows padded with 0 to the longest."""
    width = max(len(row) for row in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    valid = torch.zeros((len(rows), width), dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place] = torch.tensor(list(tokens), dtype=torch.long)
        valid[row, place] = True
    return ids, valid
