"""From demonstrations to training rows: token ids, and which of them the policy would have sampled."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from sandyard.tasks.base import Task
from sandyard.train.nano.demonstrations import (
    RUN_TOOL,
    SEMANTICS,
    SUBMIT_TOOL,
    TOOL_LINE,
    DemonstrationConfig,
    demonstrations,
    tool_schemas,
)
from sandyard.train.nano.template import CHAT_TEMPLATE, IM_START
from sandyard.train.nano.tokenizer import build_tokenizer

IGNORED = -100
_TOKENIZER_DEMONSTRATIONS = 3000
_BATCHES_AHEAD = 8


def render(messages: Sequence[dict[str, Any]]) -> str:
    """The template's text of a conversation."""
    texts, _ = render_jinja_template([list(messages)], tools=tool_schemas(), chat_template=CHAT_TEMPLATE)
    return str(texts[0])


def nano_tokenizer(tasks: Sequence[Task], seed: int, config: DemonstrationConfig) -> PreTrainedTokenizerFast:
    """The tokenizer, trained on the text of demonstrations on `tasks`."""
    shown = itertools.islice(demonstrations(tasks, seed, config), _TOKENIZER_DEMONSTRATIONS)
    return build_tokenizer((render(messages) for messages in shown), (RUN_TOOL, SUBMIT_TOOL), (SEMANTICS, TOOL_LINE))


def targets(ids: Sequence[int], header: Sequence[int], end: int) -> list[int]:
    """`ids` where an assistant's turn stands (its end token included), else `IGNORED`."""
    labels = [IGNORED] * len(ids)
    place = 0
    while place < len(ids):
        if list(ids[place : place + len(header)]) != list(header):
            place += 1
            continue
        place += len(header)
        stop = list(ids).index(end, place) + 1
        labels[place:stop] = ids[place:stop]
        place = stop
    return labels


def batches(
    tokenizer: PreTrainedTokenizerFast, tasks: Sequence[Task], size: int, seed: int, config: DemonstrationConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), each [size, T], right-padded; rows of like length share a batch."""
    header = tokenizer.encode(f"{IM_START}assistant\n", add_special_tokens=False)
    stream = demonstrations(tasks, seed, config)
    rng = random.Random(f"sandyard-batches-{seed}")
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    while True:
        texts = [render(next(stream)) for _ in range(size * _BATCHES_AHEAD)]
        rows = sorted((tokenizer.encode(text, add_special_tokens=False) for text in texts), key=len)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        rng.shuffle(parts)
        for part in parts:
            yield _pad(part, pad), _pad([targets(row, header, end) for row in part], IGNORED)


def _pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
