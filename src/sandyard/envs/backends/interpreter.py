"""Programs run in an AST interpreter, which refuses what it would run otherwise than CPython. NOT isolated."""

from __future__ import annotations

from typing import Any

from sandyard.envs.backends.semantics import Semantics
from sandyard.envs.code import TOOL_SCHEMA as TOOL_SCHEMA
from sandyard.envs.interpreter.env import InterpreterCodeEnv

NAME = "interpreter"
SYSTEM_PROMPT = """You solve Python programming tasks with two tools.
run_python(code) runs a program with a Python 3 interpreter and returns what it prints. \
All runs share one session: variables, functions and imports of an earlier run are still there. \
Programs may use functions, classes, loops, comprehensions, exceptions and common modules of the standard library. \
There are no files and no standard input, no generators with yield, decorators, global or with. \
A run is stopped after {run_timeout:g} seconds, and then all variables are gone.
submit_solution(code) submits the final program and ends the episode. \
It is judged by hidden tests that call the functions it defines.
You have {max_turns} turns."""
SEMANTICS = Semantics(
    language="AST interpreter; what differs from CPython is refused",
    state="kept through the episode",
    files="none",
    modules="a list, of the standard library",
    network="none",
    isolation="none: only what it accepts",
)


def system_prompt(*, max_turns: int, run_timeout: float = 10.0) -> str:
    """`SYSTEM_PROMPT` with this episode's limits."""
    return SYSTEM_PROMPT.format(max_turns=max_turns, run_timeout=run_timeout)


def make_env(*, run_timeout: float = 10.0, **options: Any) -> InterpreterCodeEnv:
    """A closed env with the recipe's two tools; what only a sandbox has (`lease`, …) is ignored."""
    known = {name: options[name] for name in ("observation_limit", "imports") if options.get(name) is not None}
    return InterpreterCodeEnv(run_timeout=run_timeout, **known)


def describe() -> str:
    return f"{NAME}: {SEMANTICS}; needs smolagents"
