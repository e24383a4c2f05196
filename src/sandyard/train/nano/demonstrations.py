"""Scripted demonstrations for the warm start.

They teach the form (the tools, the names, the numbers, the syntax) and leave the skill to
reinforcement learning: the operation is the right one only with probability `right`, else it is a
near miss of the same family, so that an imitator solves a task about that often.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sandyard.tasks.base import Task
from sandyard.tasks.builtin.families import BY_NAME
from sandyard.tasks.builtin.generate import FUNCTION_NAMES

RUN_TOOL = "run_python"
SUBMIT_TOOL = "submit_solution"
MAX_TURNS = 3
# Said in every prompt: one token each in the nano tokenizer, which halves what a rollout costs.
SEMANTICS = "Solve the task in Python. Each run is a fresh process. Submitting ends it."
TOOL_LINE = f"Tools: {RUN_TOOL}(code), {SUBMIT_TOOL}(code)."


@dataclass(frozen=True, slots=True)
class DemonstrationConfig:
    """Shares are probabilities per demonstration."""

    right: float = 0.43
    tries_first: float = 0.15  # runs the function before submitting it
    max_turns: int = MAX_TURNS


def system_prompt(max_turns: int = MAX_TURNS) -> str:
    """The nano policy's system prompt: what is true of every CPython back end, in few tokens."""
    return f"{SEMANTICS} You have {max_turns} turns."


def opening(prompt: str, max_turns: int = MAX_TURNS) -> list[dict[str, Any]]:
    """The messages before the policy's first turn."""
    return [{"role": "system", "content": system_prompt(max_turns)}, {"role": "user", "content": prompt}]


def tool_schemas() -> list[dict[str, Any]]:
    """The two tools of the code environment, as the template shows them."""
    return [_schema(RUN_TOOL), _schema(SUBMIT_TOOL)]


def demonstrate(task: Task, rng: random.Random, config: DemonstrationConfig) -> list[dict[str, Any]]:
    """One scripted conversation on a built-in task, under a function name drawn anew."""
    family, k = BY_NAME[task.family], int(task.metadata["parameter"])
    function = rng.choice(FUNCTION_NAMES)
    expression = family.right if rng.random() < config.right else rng.choice(family.wrong)
    code = family.solution(function, k, expression)
    messages = opening(family.prompt(function, k, rng.randrange(len(family.phrases))), config.max_turns)
    if rng.random() < config.tries_first:
        program = f"{code}\n{family.trial(function)}"
        messages += [_call(RUN_TOOL, program), {"role": "tool", "content": _output(program)}]
    return [*messages, _call(SUBMIT_TOOL, code)]


def demonstrations(
    tasks: Sequence[Task], seed: int, config: DemonstrationConfig | None = None
) -> Iterator[list[dict[str, Any]]]:
    """Endless demonstrations, each pass over `tasks` in a new order; the same for the same seed."""
    rng = random.Random(f"sandyard-demonstrations-{seed}")
    settings = config or DemonstrationConfig()
    while True:
        for task in rng.sample(list(tasks), len(tasks)):
            yield demonstrate(task, rng, settings)


def _call(tool: str, code: str) -> dict[str, Any]:
    function = {"name": tool, "arguments": {"code": code}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _output(program: str) -> str:
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink):
        exec(program, {})  # our own script, never a policy's
    return sink.getvalue().rstrip("\n")  # as the envs render it


def _schema(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
