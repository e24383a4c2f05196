"""A policy over any transformers decoder: continuous batching to sample, exact log-probs to train."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sandyard.errors import ConfigError
from sandyard.train.policies.base import FinishReason, Generation, Message, ParsedTurn, Policy, SamplingParams
from sandyard.train.policies.chat import ChatFormat, choose_template
from sandyard.train.policies.completions import shared_logprobs
from sandyard.train.policies.decode import DecodeLoop, cache_argument
from sandyard.train.policies.parsers import CUT, Parser, parse_hermes


class TransformersPolicy(Policy):
    """`model` (a causal LM whose cache is plain attention) and its `tokenizer`.

    `max_length`: tokens of a whole trajectory; default and ceiling are what the model can hold.
    `chat_template`: "hermes" for the built-in ChatML-with-tools template, None for the tokenizer's own.
    `parser` turns the text of a turn into calls. `max_batch`: rows decoded at once.

    The model is kept in eval mode: dropout would make the log-probs of training and sampling differ.
    Sampling and training must not overlap; the trainer alternates. Raises `ConfigError` for a template
    without tool calls and for a model with recurrent layers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        chat_template: str | None = None,
        parser: Parser = parse_hermes,
        max_batch: int = 256,
    ) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer, choose_template(tokenizer, chat_template))
        self.max_length = _max_length(model.config, max_length)
        self._parser = parser
        self.base_model = model.get_base_model() if hasattr(model, "peft_config") else model
        self.cache_argument = cache_argument(self.base_model)
        self._stop = frozenset(_stop_ids(model, self.chat.end_of_turn))
        self._decode = DecodeLoop(self.base_model, self._stop, max_batch=max_batch)

    @property
    def batch_tokens(self) -> int:
        """Padded tokens of one training forward whose float32 logits stay within half a GiB."""
        vocabulary = int(self.model.config.get_text_config(decoder=True).vocab_size)
        return max(1, 2**27 // vocabulary)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.chat.render_prompt(messages, tools)

    def render_observation(self, tool_names: Sequence[str], observations: Sequence[str]) -> list[int]:
        return self.chat.observation(tool_names, observations)

    def close_turn(self, token_ids: Sequence[int]) -> list[int]:
        return self.chat.close_turn(token_ids)

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        if not token_ids or token_ids[-1] not in self._stop:
            return ParsedTurn(self.decode(token_ids).strip(), error=CUT)
        return self._parser(self.decode(token_ids[:-1]))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """See `Policy`. With temperature 0 the log-probs are 0: the distribution is one point.

        A prompt that leaves no room in `max_length` gives an empty generation with LENGTH."""
        room = self.max_length - len(prompt_ids)
        if room <= 0:
            return Generation((), (), FinishReason.LENGTH)
        if params.max_tokens > room:
            params = SamplingParams(room, params.temperature, params.seed)
        return await self._decode.generate(prompt_ids, params)

    def logprobs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Policy`; in float32 whatever the model's type. The entropy carries no gradient."""
        return model_logprobs(self.model, input_ids, attention_mask, temperature)

    def completion_logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` of the completions alone, [B, longest completion]; a prompt that several rows share is
        computed once. Agrees with `logprobs` up to rounding."""
        return shared_logprobs(self.base_model, self.cache_argument, prompts, completions, temperature)

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def save(self, directory: Path) -> None:
        """Write model, tokenizer and the template in use (so that no option is needed to load it)."""
        directory.mkdir(parents=True, exist_ok=True)
        self.tokenizer.chat_template = self.chat.template
        model = self.model
        if hasattr(model, "merge_and_unload"):
            # Whole, so that it loads without the base model and without peft.
            model = copy.deepcopy(model).merge_and_unload()
        with quiet_transformers():
            model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the library's own progress bars, which would break ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def model_logprobs(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [B, T-1] of input_ids[:, 1:], entropy [B, T-1] without gradient) of the distribution
    softmax(logits / temperature), in float32."""
    positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False)
    logits = output.logits[:, :-1].float() / temperature
    logps = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(dim=-1)
    return logps.gather(2, input_ids[:, 1:, None])[:, :, 0], entropy


def _stop_ids(model: Any, end_of_turn: int) -> set[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    return {end_of_turn, *([eos] if isinstance(eos, int) else eos or [])}


def _max_length(config: Any, wanted: int | None) -> int:
    text = config.get_text_config(decoder=True)
    other = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if other:
        raise ConfigError(
            f"the model has layers of kind {', '.join(other)}, whose state cannot be batched row by row",
            remedy="use a model with plain attention",
        )
    limit = int(getattr(text, "max_position_embeddings", 0) or 2048)
    if getattr(text, "use_sliding_window", True) and getattr(text, "sliding_window", None):
        limit = min(limit, int(text.sliding_window))  # within the window, sliding attention is plain attention
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max_length {wanted} is more than the {limit} tokens that the model holds")
    return wanted or limit
