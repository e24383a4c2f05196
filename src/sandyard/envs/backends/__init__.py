"""Back ends of the code recipe, by name: `CODE_RL_BACKEND` chooses one.

A back end is one module here with `NAME`, `SYSTEM_PROMPT`, `TOOL_SCHEMA`, `SEMANTICS`,
`make_env()` and `describe()`. The prompt says what is true of the back end; a test holds each to its word.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Protocol, cast

from sandyard.envs.backends import interpreter, memory, process, sandbox
from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.base import ToolSpec
from sandyard.envs.toolenv import ToolEnv
from sandyard.errors import ConfigError

DEFAULT = "sandbox"


class Backend(Protocol):
    """What a back end's module has."""

    NAME: str
    SYSTEM_PROMPT: str
    TOOL_SCHEMA: Sequence[ToolSpec]
    SEMANTICS: Semantics
    make_env: Callable[..., ToolEnv]
    system_prompt: Callable[..., str]
    describe: Callable[[], str]


_MODULES: tuple[ModuleType, ...] = (sandbox, process, interpreter, memory)


def known_backends() -> list[str]:
    return [module.NAME for module in _MODULES]


def load_backend(name: str | None = None, *, environ: Mapping[str, str] | None = None) -> Backend:
    """The back end called `name`, else by `CODE_RL_BACKEND`, else `sandbox`. Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    wanted = name or environ.get("CODE_RL_BACKEND") or DEFAULT
    for module in _MODULES:
        if wanted == module.NAME:
            return cast(Backend, module)
    source = "" if name else " (from CODE_RL_BACKEND)"
    raise ConfigError(f"there is no back end {wanted!r}{source}; known: {', '.join(known_backends())}")
