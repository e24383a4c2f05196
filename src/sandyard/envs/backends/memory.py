"""Programs run as processes of this machine, for tests. NOT isolated."""

from __future__ import annotations

from typing import Any

from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.code import TOOL_SCHEMA as TOOL_SCHEMA
from sandyard.envs.memory import MemoryCodeEnv

NAME = "memory"
SYSTEM_PROMPT = """You solve Python programming tasks with two tools.
run_python(code) runs a program with Python 3 and returns what it prints. \
Every run is a fresh process: no variable, function or import of an earlier run is left. \
Files that a program writes stay until the episode ends. \
There is no standard input, and a run is stopped after {run_timeout:g} seconds.
submit_solution(code) submits the final program and ends the episode. \
It is judged by hidden tests that call the functions it defines.
You have {max_turns} turns."""
SEMANTICS = Semantics(
    language="CPython",
    state="fresh process",
    files="kept through the episode",
    modules="those of this machine",
    network="that of this machine",
    isolation="none: for tests",
)


def system_prompt(*, max_turns: int, run_timeout: float = 10.0) -> str:
    """`SYSTEM_PROMPT` with this episode's limits."""
    return SYSTEM_PROMPT.format(max_turns=max_turns, run_timeout=run_timeout)


def make_env(*, run_timeout: float = 10.0, **options: Any) -> MemoryCodeEnv:
    """A closed env with the recipe's two tools; what only a sandbox has (`lease`, …) is ignored."""
    limit = options.get("observation_limit")
    extra = {"observation_limit": limit} if limit is not None else {}
    return MemoryCodeEnv(run_timeout=run_timeout, **extra)


def describe() -> str:
    return f"{NAME}: {SEMANTICS}"
