"""How often a policy's first answer is the right one, without running anything.

Sampled code is never executed here: it counts as right when it is the reference but for layout. That
is what the warm start needs to know; the true score comes from the sandboxes.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from sandyard.tasks.base import Task
from sandyard.train.nano.demonstrations import MAX_TURNS, RUN_TOOL, SUBMIT_TOOL, opening, tool_schemas
from sandyard.train.policies.base import ParsedTurn, Policy, SamplingParams
from sandyard.train.seeds import derive_seed

_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FirstTurns:
    """Shares of sampled first turns: with the right program, and with a well-formed call."""

    right: float
    well_formed: float


async def measure_first_turns(
    policy: Policy, tasks: Sequence[Task], *, samples: int = 2, temperature: float = 1.0, seed: int = 0
) -> FirstTurns:
    """Sample the first turn of every task `samples` times."""
    prompts = [policy.render_prompt(opening(task.prompt, MAX_TURNS), tool_schemas()) for task in tasks]
    pairs = [(task, prompt) for task, prompt in zip(tasks, prompts, strict=True) for _ in range(samples)]
    generations = await asyncio.gather(
        *(
            policy.generate(prompt, SamplingParams(_MAX_TOKENS, temperature, derive_seed("first-turns", seed, index)))
            for index, (_, prompt) in enumerate(pairs)
        )
    )
    codes = [_code(policy.parse_turn(generation.token_ids)) for generation in generations]
    right = sum(code is not None and is_reference(code, task) for code, (task, _) in zip(codes, pairs, strict=True))
    return FirstTurns(right / len(pairs), sum(code is not None for code in codes) / len(pairs))


def is_reference(code: str, task: Task) -> bool:
    """Whether `code` is the task's reference solution but for layout, or that and a line that prints."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    tree.body = tree.body[:1]
    return ast.dump(tree) == ast.dump(ast.parse(task.reference or ""))


def _code(turn: ParsedTurn) -> str | None:
    """The program of the turn's call; None if there is no well-formed one."""
    if turn.error is not None or not turn.calls or turn.calls[0].name not in (RUN_TOOL, SUBMIT_TOOL):
        return None
    code = turn.calls[0].arguments.get("code")
    return code if isinstance(code, str) else None
