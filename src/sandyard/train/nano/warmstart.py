"""The warm start: a short supervised pass that teaches the form and leaves the skill to be learned."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from sandyard.errors import ConfigError
from sandyard.tasks.base import Task
from sandyard.train.nano.corpus import IGNORED, batches, nano_tokenizer
from sandyard.train.nano.demonstrations import DemonstrationConfig
from sandyard.train.nano.measure import FirstTurns, measure_first_turns
from sandyard.train.nano.model import build_model
from sandyard.train.policies.transformers import TransformersPolicy

_WARM_UP = 30
_FLOOR = 0.1  # of the learning rate, at the end of the schedule
_MAX_GRAD_NORM = 1.0
_REPORT_EVERY = 10

OnProgress = Callable[[int, int, float], None]  # (step, of, loss)


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """`steps` of `batch_size` demonstrations; while the policy solves less than `window[0]` of the
    held-out tasks, up to `extra_rounds` further rounds of a third as many. Raises `ConfigError`."""

    steps: int = 600
    batch_size: int = 24
    learning_rate: float = 3e-3
    extra_rounds: int = 3
    window: tuple[float, float] = (0.2, 0.5)
    samples: int = 2
    seed: int = 0
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.samples < 1 or self.extra_rounds < 0:
            raise ConfigError("steps, batch_size and samples of the warm start must be at least 1")
        if not 0 <= self.window[0] < self.window[1] <= 1:
            raise ConfigError(f"the warm start's window {self.window} is not a range within [0, 1]")


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What the warm start left: shares of sampled first turns on held-out tasks, before any sandbox."""

    steps: int
    loss: float
    right: float
    well_formed: float
    in_window: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def warm_start(
    train: Sequence[Task], held_out: Sequence[Task], config: WarmStartConfig, on_progress: OnProgress | None = None
) -> tuple[TransformersPolicy, WarmStartReport]:
    """Make a nano policy from nothing. The same config, tasks and torch give the same policy.

    Demonstrations are on `train` alone; `held_out` is only sampled, to see whether the policy stands in
    the window. Of the states measured the one nearest to the window's middle is kept. Blocking, and not
    from within an event loop: run it in a thread.
    """
    with _one_thread():
        tokenizer = nano_tokenizer(train, config.seed, config.demonstrations)
        model = build_model(len(tokenizer), int(tokenizer.eos_token_id), int(tokenizer.pad_token_id), config.seed)
        policy = TransformersPolicy(model, tokenizer)
        stream = batches(tokenizer, train, config.batch_size, config.seed, config.demonstrations)
        best: WarmStartReport | None = None
        weights: dict[str, torch.Tensor] = {}
        done = 0
        for steps, rate in _rounds(config):
            loss = _fit(model, stream, steps, rate, on_progress)
            done += steps
            seen = asyncio.run(measure_first_turns(policy, held_out, samples=config.samples, seed=config.seed))
            report = _report(done, loss, seen, config.window)
            if best is None or _distance(report, config) < _distance(best, config):
                best, weights = report, {name: value.clone() for name, value in model.state_dict().items()}
            if report.right >= config.window[0]:
                break
        assert best is not None
        model.load_state_dict(weights)
    return policy, best


def _rounds(config: WarmStartConfig) -> list[tuple[int, float]]:
    """(steps, peak learning rate) of the rounds."""
    further = (max(1, config.steps // 3), config.learning_rate / 3)
    return [(config.steps, config.learning_rate), *[further] * config.extra_rounds]


def _fit(
    model: Any,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    peak: float,
    on_progress: OnProgress | None,
) -> float:
    """One schedule of AdamW: linear warm-up, then a cosine down to the floor. Returns the mean of the last losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    recent: list[float] = []
    model.train()
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        rate = peak * min(1.0, (step + 1) / _WARM_UP) * (_FLOOR + (1 - _FLOOR) * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = next(stream)
        # Right-padded under a causal mask: no target ever sees the padding.
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        recent = [*recent[1 - _REPORT_EVERY :], float(loss.detach())]
        if on_progress is not None and ((step + 1) % _REPORT_EVERY == 0 or step + 1 == steps):
            on_progress(step + 1, steps, sum(recent) / len(recent))
    model.eval()
    return sum(recent) / len(recent)


def _report(steps: int, loss: float, seen: FirstTurns, window: tuple[float, float]) -> WarmStartReport:
    return WarmStartReport(steps, loss, seen.right, seen.well_formed, window[0] <= seen.right <= window[1])


def _distance(report: WarmStartReport, config: WarmStartConfig) -> float:
    return abs(report.right - sum(config.window) / 2)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On few, busy cores a second intra-op thread makes small steps slower; it also costs determinism."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
