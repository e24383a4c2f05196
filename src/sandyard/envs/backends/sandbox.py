"""Programs run in a sandbox of the server that the environment names (`AENV_API_URL`, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandyard.envs.code import TOOL_SCHEMA as TOOL_SCHEMA
from sandyard.envs.code import add_code_tools
from sandyard.envs.lease import SandboxLease
from sandyard.envs.sandbox import SandboxEnv

NAME = "sandbox"
SYSTEM_PROMPT = """You solve Python programming tasks with two tools.
run_python(code) runs a program with Python 3 in a Linux sandbox and returns what it prints. \
Every run is a fresh process: no variable, function or import of an earlier run is left. \
Files that a program writes stay until the episode ends. \
There is no network and no standard input, and a run is stopped after {run_timeout:g} seconds.
submit_solution(code) submits the final program and ends the episode. \
It is judged by hidden tests that call the functions it defines.
You have {max_turns} turns."""


def system_prompt(*, max_turns: int, run_timeout: float = 10.0) -> str:
    """`SYSTEM_PROMPT` with this episode's limits."""
    return SYSTEM_PROMPT.format(max_turns=max_turns, run_timeout=run_timeout)


def make_env(
    *,
    template: str = "base",
    run_timeout: float = 10.0,
    lease: SandboxLease | None = None,
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> SandboxEnv:
    """A closed env with the recipe's two tools; `options` are further ones of `SandboxEnv`."""
    env = SandboxEnv(template, lease=lease, metadata=metadata, include_default_tools=False, **options)
    return add_code_tools(env, run_timeout=run_timeout)


def describe() -> str:
    return "sandbox: each episode has its own Linux sandbox, each run a fresh CPython"
