"""The contract of a policy: it samples token ids, and it can be trained on exactly those.

A policy owns its tokenizer, its chat template and its parser of tool calls, so that training,
evaluation and demonstrations use the same code. Token ids are plain lists of ints; `logprobs` are
natural logs of the sampling distribution at the sampling temperature, one per sampled token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]  # {"role", "content", "tool_calls"?}: the chat-template convention


class FinishReason(StrEnum):
    STOP = "stop"  # sampled the end-of-turn token (it is the last of token_ids)
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    seed: int | None = None  # of this request alone, whatever it is batched with


@dataclass(frozen=True, slots=True)
class Generation:
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What a sampled turn says. `error` is a text for the policy when a call could not be parsed."""

    content: str
    calls: Sequence[ToolCall] = field(default_factory=tuple)
    error: str | None = None


class Policy(ABC):
    max_length: int  # tokens of a whole trajectory the model can hold

    @abstractmethod
    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of the conversation with the generation prompt. Raises `ConfigError` if the chat
        template has no tool calls."""

    @abstractmethod
    def render_observation(self, tool_names: Sequence[str], observations: Sequence[str]) -> list[int]:
        """Token ids that follow a sampled turn: template glue, tool answers, next generation prompt.

        Appended as they are, with mask 0; the sampled turn is never rendered again."""

    @abstractmethod
    def close_turn(self, token_ids: Sequence[int]) -> list[int]:
        """Glue that must follow a sampled turn of these ids before an observation (end-of-turn token
        when the turn was cut, the newline after it)."""

    @abstractmethod
    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn: ...

    @abstractmethod
    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one turn. Concurrent calls are batched; a call never waits for a batch to end."""

    @abstractmethod
    def logprobs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [B, T-1] of input_ids[:, 1:] with gradient, entropy [B, T-1]), of the distribution at
        `temperature`: the sampling temperature, so that they compare with a `Generation`'s log-probs."""

    @abstractmethod
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters to train."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, tokenizer and template so that `--model DIRECTORY` loads them again."""
