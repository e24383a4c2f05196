"""The settings of a training run, with the flags and variables that set them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sandyard.envs.pool.settings import PoolSettings, read_number, read_switch
from sandyard.errors import ConfigError
from sandyard.train.advantages import SCALES
from sandyard.train.deadlines import Deadlines
from sandyard.train.losses import LossConfig
from sandyard.train.rollout import RolloutConfig

# What people set in the environment; flags win over it.
_VARIABLES: dict[str, tuple[str, Callable[[str, str], int]]] = {
    "MAX_TURNS": ("max_turns", read_number),
    "ENV_CONCURRENCY": ("env_concurrency", read_number),
    "ENV_REMOTE": ("env_remote", read_switch),
    "ENV_NUM_WORKERS": ("env_workers", read_number),
    "ENV_POOL_SIZE": ("env_pool_size", read_number),
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Every field is the flag of its name (`batch_size` is `--batch-size`).

    A step plays `batch_size` tasks `num_generations` times each, then makes `num_epochs` passes over them,
    one optimizer step per `minibatch` rollouts (0: all). `max_tokens` is per turn. `micro_tokens` bounds
    the padded size of one forward pass and has no effect on the result. Raises `ConfigError` naming the
    field. `env_concurrency` 0 means as many as a step has rollouts, also while evaluating. Envs that can be
    pooled run in `env_pool_size` slots (0: as many as run at once), with `env_remote` over `env_workers`
    processes of Ray.
    """

    model: str = ""
    batch_size: int = 8
    num_generations: int = 8
    max_steps: int = 10
    learning_rate: float = 1e-4
    temperature: float = 1.0
    max_tokens: int = 256
    max_turns: int = 4
    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kl_times_ratio: bool = True
    scale: str = "group"
    num_epochs: int = 1
    minibatch: int = 0
    micro_tokens: int = 16384
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    lora_rank: int = 0
    chat_template: str | None = None
    save_steps: int = 0  # 0: only at the end
    keep_checkpoints: int = 2
    seed: int = 0
    env_concurrency: int = 0
    env_remote: bool = False
    env_workers: int = 4
    env_pool_size: int = 0
    observation_limit: int = 4000
    rollout_attempts: int = 2
    max_infra_failure_rate: float = 0.5  # of the last three batches
    max_skipped: int = 5  # batches in a row without an update
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_steps", "num_epochs", "keep_checkpoints", "max_skipped", "micro_tokens"):
            _require(name, getattr(self, name), at_least=1)
        for name in ("minibatch", "lora_rank", "save_steps"):
            _require(name, getattr(self, name), at_least=0)
        # One rollout has nothing to be compared with: every advantage would be zero.
        _require("num_generations", self.num_generations, at_least=2)
        for name in ("learning_rate", "temperature", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be a finite number above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay is {self.weight_decay}, must be a finite number, 0 or above")
        if self.scale not in SCALES:
            raise ConfigError(f"scale {self.scale!r} is unknown", remedy=f"use one of {', '.join(SCALES)}")
        if not 0 <= self.max_infra_failure_rate <= 1:
            raise ConfigError(f"max_infra_failure_rate is {self.max_infra_failure_rate}, must lie in [0, 1]")
        self.loss()
        self.pool()
        self.rollout()

    @property
    def rollouts(self) -> int:
        """Rollouts of one step."""
        return self.batch_size * self.num_generations

    def loss(self) -> LossConfig:
        return LossConfig(
            loss_type=self.loss_type,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            beta=self.beta,
            kl_times_ratio=self.kl_times_ratio,
            max_completion_length=self.max_tokens * self.max_turns,
        )

    def pool(self) -> PoolSettings:
        settings = PoolSettings(self.env_pool_size, self.env_workers, self.env_remote, self.seed)
        return settings.for_trajectories(self.env_concurrency or self.rollouts)

    def rollout(self) -> RolloutConfig:
        return RolloutConfig(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            # A rollout that waits for a slot must not wait in its own time.
            env_concurrency=min(self.env_concurrency or self.rollouts, self.env_pool_size or self.rollouts),
            observation_limit=self.observation_limit,
            attempts=self.rollout_attempts,
            deadlines=self.deadlines,
        )

    def override(self, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> TrainConfig:
        """This config with the environment's settings, then `flags` (None values are left out).

        Raises `ConfigError` naming the key and its source.
        """
        environ = os.environ if environ is None else environ
        changes: dict[str, Any] = {}
        for variable, (name, read) in _VARIABLES.items():
            if environ.get(variable):
                changes[name] = read(variable, environ[variable])
        known = {item.name for item in fields(self)}
        for name, value in (flags or {}).items():
            if name not in known:
                raise ConfigError(f"setting {name!r} is unknown", remedy=f"known: {', '.join(sorted(known))}")
            if value is not None:
                changes[name] = value
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ConfigError(f"{name} is {value}, must be at least {at_least}")
