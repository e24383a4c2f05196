"""What a server serves: an env by name, and how its workers make one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sandyard.envs.backends import load_backend
from sandyard.envs.base import Env
from sandyard.envs.embedded.blackjack import BlackjackEnv
from sandyard.envs.embedded.echo import EchoEnv
from sandyard.envs.embedded.guessing import GuessingEnv
from sandyard.envs.embedded.maze import MazeEnv
from sandyard.envs.embedded.reasoning import ReasoningEnv
from sandyard.envs.factory import EnvFactory
from sandyard.errors import ConfigError

GAMES: dict[str, Callable[[], Env]] = {
    "echo": EchoEnv,
    "blackjack": BlackjackEnv,
    "guessing": GuessingEnv,
    "maze": MazeEnv,
}
_REASONING = "reasoning/"


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """`name`: `code`, `shell`, a game, `reasoning/DATASET`, or `module:Class` of an `Env` made without arguments.

    `backend` is that of the code env; `imports` are the modules that its programs may use, where the
    back end has a list.
    """

    name: str = "code"
    backend: str | None = None
    imports: Sequence[str] = ()

    def make(self) -> Env:
        """A closed env. Raises `ConfigError` for a name that leads nowhere."""
        if self.name == "code":
            backend = load_backend(self.backend)
            return backend.make_env(**_import_options(backend.NAME, tuple(self.imports)))
        if self.name == "shell":
            return _make_shell(self.backend)
        if self.name in GAMES:
            return GAMES[self.name]()
        if self.name.startswith(_REASONING):
            return ReasoningEnv(self.name.removeprefix(_REASONING))
        if ":" not in self.name:
            known = ", ".join(("code", "shell", *GAMES, f"{_REASONING}DATASET"))
            raise ConfigError(f"there is no env {self.name!r}; known: {known}, or module:Class")
        return EnvFactory(self.name).make()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EnvSpec:
        return cls(**json.loads(text))


def _import_options(backend: str, imports: tuple[str, ...]) -> dict[str, Any]:
    if not imports:
        return {}
    if backend == "interpreter":
        return {"imports": imports}
    if backend == "process":  # the standard library is there anyway
        return {"packages": tuple(name for name in imports if name.partition(".")[0] not in sys.stdlib_module_names)}
    raise ConfigError(f"back end {backend} has no list of modules: a program may import what is there")


def _make_shell(backend: str | None) -> Env:
    if backend not in (None, "sandbox"):
        raise ConfigError(f"the shell env runs in a sandbox, not on back end {backend!r}")
    from sandyard.envs.sandbox import SandboxEnv

    return SandboxEnv()
