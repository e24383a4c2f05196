"""The recipe's settings, all in one place. Every field is a flag of `sandyard train` or a `--set NAME=VALUE`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sandyard.train.config import TrainConfig
from sandyard.train.deadlines import Deadlines
from sandyard.train.nano.demonstrations import MAX_TURNS as NANO_TURNS


@dataclass(frozen=True)
class RecipeConfig:
    """0 (or nothing) means: what suits the policy, see `NANO` and `MODEL` below."""

    model: str = ""  # folder or GGUF file; without one the nano policy
    chat_template: str | None = None
    tasks: str = ""  # file in the MBPP format; without one the built-in set
    batch_size: int = 32
    num_generations: int = 4
    max_steps: int = 22
    num_epochs: int = 2
    minibatch: int = 64
    learning_rate: float = 0.0
    temperature: float = 1.0
    max_tokens: int = 0
    max_turns: int = 0
    loss_type: str = "dapo"
    beta: float = 0.0
    lora_rank: int = 0
    save_steps: int = 0
    seed: int = 0
    env_concurrency: int = 0  # sandboxes held at once
    warm_start_steps: int = 600  # of the nano policy's supervised pass; cached
    eval_samples: int = 4
    eval_tasks: int = 0  # held-out tasks to evaluate on; 0: all of them
    warm_sandboxes: int = 16  # kept ready on the server for the bursts
    lease_seconds: float = 60.0  # sandboxes outlive this process by no more
    run_dir: Path | None = None
    resume: Path | None = None


CONFIG = RecipeConfig()

# What differs between a policy of a million parameters that writes one-liners and a pretrained model.
NANO = TrainConfig(learning_rate=1.5e-4, max_tokens=96, max_turns=NANO_TURNS, env_concurrency=64, micro_tokens=4096)
MODEL = TrainConfig(learning_rate=1e-5, max_tokens=512, max_turns=4, env_concurrency=64, micro_tokens=4096)

DEADLINES = Deadlines(exec=10.0, step=30.0, rollout=240.0, batch=900.0, verify=120.0)


def train_config(config: RecipeConfig) -> TrainConfig:
    """The trainer's settings: the policy's defaults, then the environment's (MAX_TURNS, ENV_…), then the recipe's.

    Raises `ConfigError` naming the field.
    """
    chosen = {
        "learning_rate": config.learning_rate or None,
        "max_tokens": config.max_tokens or None,
        "max_turns": config.max_turns or None,
        "env_concurrency": config.env_concurrency or None,
    }
    same = (
        "model", "chat_template", "batch_size", "num_generations", "max_steps", "num_epochs", "minibatch",
        "temperature", "loss_type", "beta", "lora_rank", "save_steps", "seed",
    )  # fmt: skip
    given = {name: getattr(config, name) for name in same}
    return (MODEL if config.model else NANO).override({**chosen, **given, "deadlines": DEADLINES})


def run_directory(config: RecipeConfig) -> Path:
    """Where the run's files go: named, resumed, or a new folder under `runs/`."""
    return config.resume or config.run_dir or Path("runs") / f"code_rl-{time.strftime('%Y%m%d-%H%M%S')}"
