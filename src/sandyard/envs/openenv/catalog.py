"""What a server serves: an env by name, and how its workers make one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandyard.envs.backends import load_backend
from sandyard.envs.base import Env
from sandyard.envs.embedded.blackjack import BlackjackEnv
from sandyard.envs.embedded.echo import EchoEnv
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.embedded.maze import MazeEnv
from sandyard.errors import ConfigError

GAMES: dict[str, Callable[[], Env]] = {
    "echo": EchoEnv,
    "blackjack": BlackjackEnv,
    "guessing": GuessingEnv,
    "maze": MazeEnv,
}


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """`name`: `code`, `shell`, a game, or `module:Class` of an `Env` made without arguments.

    `backend` is that of the code env; `imports` are the modules that its programs may use, where the
    back end has a list.
    """

    name: str = "code"
    backend: str | None = None
    imports: Sequence[str] = ()

    def make(self) -> Env:
        """A closed env. Raises `ConfigError` for a name that leads nowhere."""
        if self.name == "code":
            options: dict[str, Any] = {"imports": tuple(self.imports)} if self.imports else {}
            return load_backend(self.backend).make_env(**options)
        if self.name == "shell":
            return _make_shell(self.backend)
        factory = GAMES.get(self.name) or _find_class(self.name)
        env = factory()
        if not isinstance(env, Env):
            raise ConfigError(f"env {self.name} is a {type(env).__name__}, not a sandyard.envs.base.Env")
        return env

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EnvSpec:
        return cls(**json.loads(text))


def _make_shell(backend: str | None) -> Env:
    if backend not in (None, "sandbox"):
        raise ConfigError(f"the shell env runs in a sandbox, not on back end {backend!r}")
    from sandyard.envs.sandbox import SandboxEnv

    return SandboxEnv()


def _find_class(name: str) -> Callable[[], Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(("code", "shell", *GAMES))
        raise ConfigError(f"there is no env {name!r}; known: {known}, or module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"env {name} is not a class")
    made: Callable[[], Any] = found
    return made
