"""Programs run in a sandbox of the server that the environment names (`AENV_API_URL`, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.code import TOOL_SCHEMA as TOOL_SCHEMA
from sandyard.envs.code import add_code_tools
from sandyard.envs.lease import SandboxLease
from sandyard.envs.sandbox import SandboxEnv
from sandyard.envs.session import SessionSandboxEnv

NAME = "sandbox"
_FRESH = "Every run is a fresh process: no variable, function or import of an earlier run is left."
_KEPT = """All runs share one session: variables, functions and imports of an earlier run are still there. \
A program that ends the process or cannot be stopped ends the session, and then all variables are gone."""
_PROMPT = """You solve Python programming tasks with two tools.
run_python(code) runs a program with Python 3 in a Linux sandbox and returns what it prints. \
{state} \
Files that a program writes stay until the episode ends. \
There is no network and no standard input, and a run is stopped after {{run_timeout:g}} seconds.
submit_solution(code) submits the final program and ends the episode. \
It is judged by hidden tests that call the functions it defines.
You have {{max_turns}} turns."""
SYSTEM_PROMPT = _PROMPT.format(state=_FRESH)
PERSISTENT_PROMPT = _PROMPT.format(state=_KEPT)
SEMANTICS = Semantics(
    language="CPython of the template",
    state="fresh process; persistent=True: kept through the episode",
    files="kept through the episode",
    modules="those of the template",
    network="none, unless the server's policy opens it",
    isolation="a sandbox of the server",
)


def system_prompt(*, max_turns: int, run_timeout: float = 10.0, persistent: bool = False) -> str:
    """The prompt of the form that `make_env(persistent=…)` makes, with this episode's limits."""
    return (PERSISTENT_PROMPT if persistent else SYSTEM_PROMPT).format(max_turns=max_turns, run_timeout=run_timeout)


def make_env(
    *,
    template: str = "base",
    run_timeout: float = 10.0,
    lease: SandboxLease | None = None,
    metadata: Mapping[str, str] | None = None,
    persistent: bool = False,
    **options: Any,
) -> SandboxEnv:
    """A closed env with the recipe's two tools; `options` are further ones of `SandboxEnv`."""
    if persistent:
        return SessionSandboxEnv(template, run_timeout=run_timeout, lease=lease, metadata=metadata, **options)
    options.setdefault("command_timeout", run_timeout)  # `execute` without a time of its own is a run too
    env = SandboxEnv(template, lease=lease, metadata=metadata, include_default_tools=False, **options)
    return add_code_tools(env, run_timeout=run_timeout)


def describe() -> str:
    return f"{NAME}: {SEMANTICS}"
