"""Timeouts as one chain: what is inside ends before what is around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. `exec` < `step` < `rollout` < `batch`, and `verify` < `batch`.

    A program of the policy that runs longer than `exec` is the policy's doing and is answered. A `step`
    that does not answer in its time is the infrastructure's. `rollout` is the playing of one trajectory
    and `verify` its scoring; `batch` is all of them. Raises `ConfigError` naming both of a pair that is
    in the wrong order.
    """

    exec: float = 10.0
    step: float = 60.0
    rollout: float = 300.0
    batch: float = 900.0
    verify: float = 120.0

    def __post_init__(self) -> None:
        for inner, outer in (("exec", "step"), ("step", "rollout"), ("rollout", "batch"), ("verify", "batch")):
            short, long = getattr(self, inner), getattr(self, outer)
            if not 0 < short < long:
                raise ConfigError(
                    f"deadline {inner} ({short:g} s) must be above 0 and below deadline {outer} ({long:g} s)"
                )

    def check_tools(self, limits: Mapping[str, float]) -> None:
        """Raise `ConfigError` naming a tool that may run past `step`: the policy's slowness would be taken for
        the infrastructure's failure. `limits` are seconds by tool, see `Env.time_limits`."""
        for name, limit in limits.items():
            if limit >= self.step:
                raise ConfigError(
                    f"tool {name} may run {limit:g} s, which must be below deadline step ({self.step:g} s)",
                    remedy="lower the tool's timeout or raise the deadline",
                )
