"""How an env is made in another process: an importable name and its arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sandyard.envs.base import Env
from sandyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvFactory:
    """`name` is `module:attribute` of a class or function, called with `kwargs` for every env."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, maker: Callable[..., Env], /, **kwargs: Any) -> EnvFactory:
        """The factory for something that can be imported. Raises `ConfigError` for a lambda or an inner function."""
        name = f"{maker.__module__}:{maker.__qualname__}"
        if "<" in name:
            raise ConfigError(f"{name} cannot be imported elsewhere", remedy="give a class or function of a module")
        return cls(name, kwargs)

    def find(self) -> Callable[..., Any]:
        """What `name` leads to. Raises `ConfigError`."""
        module, colon, path = self.name.partition(":")
        if not colon:
            raise ConfigError(f"env {self.name!r} is not of the form module:attribute")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"env {self.name}: {error}") from error
        if not callable(found):
            raise ConfigError(f"env {self.name} is not a class or a function")
        made: Callable[..., Any] = found
        return made

    def make(self) -> Env:
        """A closed env. Raises `ConfigError`."""
        env = self.find()(**self.kwargs)
        if not isinstance(env, Env):
            raise ConfigError(f"env {self.name} is a {type(env).__name__}, not a sandyard.envs.base.Env")
        return env
