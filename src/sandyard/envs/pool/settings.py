"""How large a pool is and where it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sandyard.errors import ConfigError

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`size` slots (0: as many as there are trajectories) over `workers` processes where `remote`, else in
    this one. `seed` is that of episodes whose task has none. `close_timeout` is how long an env may take to
    close before its worker is replaced (seconds). Raises `ConfigError` naming the field."""

    size: int = 0
    workers: int = 4
    remote: bool = False
    seed: int = 0
    close_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ConfigError(f"the pool's size is {self.size}, must be 0 (as many as trajectories) or more")
        if self.workers < 1:
            raise ConfigError(f"a pool of {self.workers} workers", remedy="set ENV_NUM_WORKERS to 1 or more")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None, **given: Any) -> PoolSettings:
        """`ENV_REMOTE`, `ENV_NUM_WORKERS` and `ENV_POOL_SIZE`; what is `given` wins, unless None."""
        environ = os.environ if environ is None else environ
        found: dict[str, Any] = {}
        if environ.get("ENV_REMOTE"):
            found["remote"] = read_switch("ENV_REMOTE", environ["ENV_REMOTE"])
        for variable, name in (("ENV_NUM_WORKERS", "workers"), ("ENV_POOL_SIZE", "size")):
            if environ.get(variable):
                found[name] = read_number(variable, environ[variable])
        return cls(**(found | {name: value for name, value in given.items() if value is not None}))

    def for_trajectories(self, count: int) -> PoolSettings:
        """With a size, if it has none."""
        return self if self.size else replace(self, size=max(1, count))


def read_switch(name: str, text: str) -> bool:
    """1/0, true/false, yes/no, on/off. Raises `ConfigError`."""
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise ConfigError(f"{name}={text!r} in the environment is neither 1 nor 0")
    return word in _YES


def read_number(name: str, text: str) -> int:
    """Raises `ConfigError`."""
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from error
