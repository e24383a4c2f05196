"""In-memory twins for users' tests: a policy that says what it is told to, over a tiny tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sandyard.train.policies.base import FinishReason, Generation, Message, ParsedTurn, Policy, SamplingParams
from sandyard.train.policies.parsers import CUT, parse_hermes

END = 256  # end of turn; ids below are bytes
_NEWLINE = 10

Script = Callable[[str, int], str]  # (conversation so far as text, seed) → next turn


class ScriptedPolicy(Policy):
    """Says `script(conversation, seed)`, or the turns of a list, one after another in each conversation.

    Token ids are the UTF-8 bytes of the text and `END` after each turn. `delay` is how long a turn takes
    (seconds); `concurrent` counts the most requests that were in flight at once. Not trainable.
    """

    def __init__(self, script: Script | Sequence[str], *, max_length: int = 4096, delay: float = 0.0) -> None:
        self.max_length = max_length
        self.delay = delay
        self.concurrent = 0
        self._in_flight = 0
        self._script = script

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return list("\n".join([json.dumps(list(tools)), *lines, "assistant: "]).encode())

    def render_observation(self, tool_names: Sequence[str], observations: Sequence[str]) -> list[int]:
        return list("".join(f"tool: {text}\n" for text in observations).encode()) + list(b"assistant: ")

    def close_turn(self, token_ids: Sequence[int]) -> list[int]:
        ended = bool(token_ids) and token_ids[-1] == END
        return [_NEWLINE] if ended else [END, _NEWLINE]

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        if not token_ids or token_ids[-1] != END:
            return ParsedTurn(self.decode(token_ids), error=CUT)
        return parse_hermes(self.decode(token_ids[:-1]))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != END).decode("utf-8", "replace")

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        self._in_flight += 1
        self.concurrent = max(self.concurrent, self._in_flight)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self._in_flight -= 1
        ids = [*self._next(prompt_ids, params.seed or 0).encode(), END]
        room = min(params.max_tokens, self.max_length - len(prompt_ids))
        reason = FinishReason.STOP if len(ids) <= room else FinishReason.LENGTH
        ids = ids[: max(0, room)]
        return Generation(ids, [-0.5] * len(ids), reason)

    def _next(self, prompt_ids: Sequence[int], seed: int) -> str:
        if callable(self._script):
            return self._script(self.decode(prompt_ids), seed)
        spoken = list(prompt_ids).count(END)
        return self._script[min(spoken, len(self._script) - 1)]

    def logprobs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (input_ids.shape[0], input_ids.shape[1] - 1)
        return torch.full(shape, -0.5), torch.zeros(shape)

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return []

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
