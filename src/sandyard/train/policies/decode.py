"""Continuous batching: one worker thread samples for every waiting request, one token a step.

Requests join at the next step and leave when they end; nobody waits for a batch. The event loop is
free meanwhile: results come back through `loop.call_soon_threadsafe`. The thread lives only while
there is work, so there is nothing to close. A failure in the model reaches every request in flight.

Each request draws its own uniforms from its own seed (inverse transform sampling: the first token
whose cumulative probability exceeds u), so what it samples does not depend on its neighbours, up to
the rounding of batched kernels.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sandyard.train.policies.base import FinishReason, Generation, SamplingParams
from sandyard.train.policies.kvcache import KV, BatchCache, PrefillCache, PrefixStore


@dataclass(slots=True, eq=False)
class _Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    rng: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def finish_reason(self, stop: frozenset[int]) -> FinishReason | None:
        if self.ids[-1] in stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.ids) >= self.params.max_tokens else None


def cache_argument(model: Any) -> str:
    """What the model's forward calls its cache: transformers renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class DecodeLoop:
    """Samples from `model` (a transformers decoder) until a token of `stop` or `max_tokens`.

    `max_batch` rows decode at once, the rest wait in order. `prefill_tokens` bounds the padded size of
    one prefill. `prefix_bytes` bounds the memory of prefixes that later turns of a trajectory reuse; it
    is dropped as soon as a weight changes.
    """

    def __init__(
        self,
        model: Any,
        stop: frozenset[int],
        *,
        max_batch: int = 256,
        prefill_tokens: int = 16384,
        prefix_bytes: int = 256 * 2**20,
    ) -> None:
        self._model = model
        self._stop = stop
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        names = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._keep_logits = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._lock = threading.Lock()
        self._waiting: deque[_Request] = deque()
        self._running = False
        self._active: list[_Request] = []
        self._cache = BatchCache()
        self._prefixes = PrefixStore(prefix_bytes)
        self._version = -1

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation of `prompt`. Cancelling gives the place in the batch back."""
        loop = asyncio.get_running_loop()
        request = _Request(tuple(prompt), params, loop, loop.create_future(), random.Random(params.seed))
        with self._lock:
            self._waiting.append(request)
        # Started on the loop's next turn: calls made together are then prefilled together.
        loop.call_soon(self._ensure_worker)
        return await request.future

    def _ensure_worker(self) -> None:
        with self._lock:
            if self._running or not self._waiting:
                return
            self._running = True
        threading.Thread(target=self._work, name="sandyard-decode", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._active and not self._waiting:
                    self._running = False
                    return
                room = self._max_batch - len(self._active)
                new = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
            try:
                with torch.inference_mode():
                    self._turn([request for request in new if not request.future.cancelled()])
            except Exception as error:  # noqa: BLE001 - whatever the model raises belongs to the waiting callers
                self._fail([*self._active, *(r for r in new if r not in self._active)], error)

    def _turn(self, new: list[_Request]) -> None:
        if new:
            self._join(new)
        self._leave()
        if self._active:
            self._step()
            self._leave()

    def _join(self, new: list[_Request]) -> None:
        self._forget_old_weights()
        for chunk in self._chunks(new):
            logits, rows = self._prefill([prompt for prompt, _ in chunk])
            requests = [request for _, group in chunk for request in group]
            index = [i for i, (_, group) in enumerate(chunk) for _ in group]
            self._cache.add([rows[i] for i in index])
            self._active.extend(requests)
            self._sample(logits[index], requests)

    def _forget_old_weights(self) -> None:
        version = sum(parameter._version for parameter in self._model.parameters())
        if version != self._version:
            self._prefixes.clear()
            self._version = version

    def _chunks(self, new: list[_Request]) -> list[list[tuple[tuple[int, ...], list[_Request]]]]:
        """Requests by prompt (one prefill for a whole group), in chunks of bounded padded size."""
        groups: dict[tuple[int, ...], list[_Request]] = {}
        for request in new:
            groups.setdefault(request.prompt, []).append(request)
        chunks: list[list[tuple[tuple[int, ...], list[_Request]]]] = [[]]
        for item in sorted(groups.items(), key=lambda item: len(item[0])):
            if chunks[-1] and (len(chunks[-1]) + 1) * len(item[0]) > self._prefill_tokens:
                chunks.append([])
            chunks[-1].append(item)
        return chunks

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, list[KV]]:
        """Last-token logits [n, vocabulary] and the KV of every prompt."""
        device = self._model.device
        known = [self._prefixes.longest(prompt) for prompt in prompts]
        known_lengths = [0 if kv is None else kv.shape[3] for kv in known]
        new_lengths = [len(prompt) - length for prompt, length in zip(prompts, known_lengths, strict=True)]
        past_width, width = max(known_lengths), max(new_lengths)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        valid = torch.zeros((len(prompts), past_width + width), dtype=torch.bool)
        past = _stack_right(known, past_width)
        for row, (prompt, length, count) in enumerate(zip(prompts, known_lengths, new_lengths, strict=True)):
            ids[row, width - count :] = torch.tensor(prompt[length:])
            valid[row, past_width - length : past_width] = True
            valid[row, past_width + width - count :] = True
        positions = (valid.long().cumsum(1) - 1).clamp(min=0)[:, past_width:]
        causal = torch.ones((width, past_width + width), dtype=torch.bool).tril(past_width)
        seen = valid[:, None, None, :] & causal
        mask = (~seen).to(self._model.dtype) * torch.finfo(self._model.dtype).min
        cache = PrefillCache(past)
        logits = self._forward(ids.to(device), mask.to(device), positions.to(device), cache)
        new = torch.stack(cache.new, dim=1)  # [2, layers, n, heads, width, dim]
        rows = []
        for row, (prompt, kv, count) in enumerate(zip(prompts, known, new_lengths, strict=True)):
            part = new[:, :, row, :, width - count :]
            rows.append(part.clone() if kv is None else torch.cat((kv, part), dim=3))
            # Without the last token, so that the same prompt again finds a proper prefix.
            self._prefixes.put(prompt[:-1], rows[-1][:, :, :, :-1].clone())
        return logits, rows

    def _step(self) -> None:
        cache = self._cache
        cache.ensure_room()
        device = self._model.device
        ids = torch.tensor([[request.ids[-1]] for request in self._active], device=device)
        positions = torch.tensor([[length] for length in cache.lengths()], device=device)
        logits = self._forward(ids, cache.mask(), positions, cache)
        cache.advance()
        self._sample(logits, self._active)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: BatchCache | PrefillCache
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._keep_logits,
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _sample(self, logits: torch.Tensor, requests: list[_Request]) -> None:
        """Append one token to every request. Greedy (temperature 0) has log-prob 0: it is certain."""
        temperatures = torch.tensor([r.params.temperature for r in requests], device=logits.device)
        uniforms = torch.tensor([[r.rng.random()] for r in requests], dtype=torch.float64, device=logits.device)
        greedy = temperatures == 0
        logps = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
        cumulative = logps.double().exp().cumsum(dim=-1)
        tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        chosen = torch.where(greedy[:, None], 0.0, logps.gather(1, tokens))
        for request, token, logp in zip(requests, tokens[:, 0].tolist(), chosen[:, 0].tolist(), strict=True):
            if not math.isfinite(logp):
                raise FloatingPointError("the policy's logits are not finite: its weights are ruined")
            request.ids.append(token)
            request.logprobs.append(logp)

    def _leave(self) -> None:
        gone = [i for i, r in enumerate(self._active) if r.finish_reason(self._stop) or r.future.cancelled()]
        if not gone:
            return
        finished = [self._active[i] for i in gone]
        for index, request in zip(gone, finished, strict=True):
            if request.finish_reason(self._stop):
                self._prefixes.put((*request.prompt, *request.ids[:-1]), self._cache.row(index))
        order = self._cache.remove(gone)
        self._active = [self._active[i] for i in order]
        for request in finished:
            reason = request.finish_reason(self._stop) or FinishReason.LENGTH
            _call(request, Generation(request.ids, request.logprobs, reason))

    def _fail(self, requests: list[_Request], error: Exception) -> None:
        self._active = []
        self._cache.clear()
        self._prefixes.clear()
        for request in requests:
            _call(request, error)


def _stack_right(items: list[KV | None], width: int) -> torch.Tensor | None:
    """Stack KVs of different lengths, right-aligned: [2, layers, rows, heads, width, dim]; None if all are."""
    first = next((item for item in items if item is not None), None)
    if first is None:
        return None
    two, layers, heads, _, dim = first.shape
    stacked = first.new_zeros((two, layers, len(items), heads, width, dim))
    for row, item in enumerate(items):
        if item is not None:
            stacked[:, :, row, :, width - item.shape[3] :] = item
    return stacked


def _call(request: _Request, result: Generation | Exception) -> None:
    def deliver() -> None:
        if request.future.done():
            return
        if isinstance(result, Exception):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)

    if not request.loop.is_closed():
        request.loop.call_soon_threadsafe(deliver)
