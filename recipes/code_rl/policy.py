"""Who plays: the warm-started nano policy, or any local causal LM that transformers loads."""

from __future__ import annotations

import asyncio

import torch
from rich.console import Console

from sandyard.train.config import TrainConfig
from sandyard.train.nano.warmstart import WarmStartConfig
from sandyard.train.policies.loading import load_policy
from sandyard.train.policies.nano import NanoPolicy, load_nano
from sandyard.train.policies.transformers import TransformersPolicy

_SHOWN_EVERY = 50


async def make_policy(train: TrainConfig, warm_start_steps: int, console: Console) -> TransformersPolicy:
    """Load `model`, else the nano policy (from its cache, or warm-started now)."""
    torch.set_num_threads(1)  # small steps on few, shared cores: see `sandyard.train.nano.warmstart`
    if train.model:
        console.print(f"loading {train.model}")
        return await asyncio.to_thread(
            load_policy, train.model, chat_template=train.chat_template, lora_rank=train.lora_rank
        )
    config = WarmStartConfig(steps=warm_start_steps, seed=train.seed)

    def show(step: int, of: int, loss: float) -> None:
        if step % _SHOWN_EVERY == 0 or step == of:
            console.print(f"warm start {step}/{of}  loss {loss:.3f}", highlight=False)

    nano = await asyncio.to_thread(load_nano, config, on_progress=show)
    _tell(nano, config, console)
    return nano.policy


def _tell(nano: NanoPolicy, config: WarmStartConfig, console: Console) -> None:
    origin = "from the cache" if nano.cached else "made now"
    low, high = config.window
    console.print(
        f"nano policy {origin}: {nano.report.right:.0%} of its first answers on held-out tasks are right "
        f"(wanted: {low:.0%} to {high:.0%})  {nano.directory}",
        highlight=False,
        soft_wrap=True,
    )
    if not nano.report.in_window:
        console.print("[yellow]the warm start ended outside its window: the lift will look other than usual[/yellow]")
