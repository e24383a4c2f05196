"""Programs run in a real CPython: one light, confined process for each episode, on this machine."""

from __future__ import annotations

from typing import Any

from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.code import TOOL_SCHEMA as TOOL_SCHEMA
from sandyard.envs.process.env import ProcessCodeEnv

NAME = "process"
_COMMON = """Files that a program writes stay until the episode ends. \
There is no network and no standard input, no shell and no other program than Python, and only the standard library. \
A run is stopped after {run_timeout:g} seconds.
submit_solution(code) submits the final program and ends the episode. \
It is judged by hidden tests that call the functions it defines.
You have {max_turns} turns."""
SYSTEM_PROMPT = f"""You solve Python programming tasks with two tools.
run_python(code) runs a program with Python 3 and returns what it prints. \
All runs share one session: variables, functions and imports of an earlier run are still there. \
A program that ends the process or cannot be stopped ends the session, and then all variables and files are gone. \
{_COMMON}"""
FRESH_PROMPT = f"""You solve Python programming tasks with two tools.
run_python(code) runs a program with Python 3 and returns what it prints. \
Every run is a fresh process: no variable, function or import of an earlier run is left. \
{_COMMON}"""
SEMANTICS = Semantics(
    language="CPython",
    state="kept through the episode; persistent=False: fresh process",
    files="kept, 64 MiB",
    modules="standard library, and packages that are named",
    network="none",
    isolation="namespaces, seccomp, limits; shares the kernel",
)
_OPTIONS = ("observation_limit", "limits", "packages")


def system_prompt(*, max_turns: int, run_timeout: float = 10.0, persistent: bool = True) -> str:
    """The prompt of the form that `make_env(persistent=…)` makes, with this episode's limits."""
    return (SYSTEM_PROMPT if persistent else FRESH_PROMPT).format(max_turns=max_turns, run_timeout=run_timeout)


def make_env(*, run_timeout: float = 10.0, persistent: bool = True, **options: Any) -> ProcessCodeEnv:
    """A closed env with the recipe's two tools; what only a sandbox has (`lease`, …) is ignored."""
    known = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    return ProcessCodeEnv(run_timeout=run_timeout, persistent=persistent, **known)


def describe() -> str:
    return f"{NAME}: {SEMANTICS}"
