"""The same solutions scored in the interpreter and in CPython: the same number, or none."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from sandyard.errors import Unsupported
from sandyard.tasks.base import Task
from sandyard.tasks.mbpp import task_from_row
from sandyard.verify.base import Verifier
from sandyard.verify.interpreter import InterpreterVerifier
from sandyard.verify.local import local_verifier
from sandyard.verify.program import RunnerLimits
from sandyard.verify.shaping import score
from tests.envs.interpreter.mutations import mutate
from tests.envs.interpreter.oracle import run_in_cpython

CHOSEN = (  # of MBPP's kind, written for these tests
    (
        "def first_two(xs):\n    return xs[:2]\n",
        ["assert first_two([1, 2, 3]) == [1, 2]", "assert first_two([]) == []"],
    ),
    (
        "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
        "        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
        ["assert count_words('a b a') == {'a': 2, 'b': 1}", "assert count_words('') == {}"],
    ),
    (
        "import math\ndef area(r):\n    return round(math.pi * r ** 2, 2)\n",
        ["assert area(1) == 3.14", "assert abs(area(2) - 12.57) < 1e-6"],
    ),
    (
        "def sort_pairs(pairs):\n    return sorted(pairs, key=lambda p: (p[1], p[0]))\n",
        ["assert sort_pairs([(1, 'b'), (2, 'a')]) == [(2, 'a'), (1, 'b')]", "assert sort_pairs([]) == []"],
    ),
)


def chosen_tasks() -> list[Task]:
    rows = [
        {"task_id": number, "text": "What its tests say.", "code": code, "test_list": tests}
        for number, (code, tests) in enumerate(CHOSEN)
    ]
    return [task_from_row(row) for row in rows]


def mbpp_tasks() -> list[Task]:
    path = Path(os.environ.get("SANDYARD_MBPP", Path(__file__).parents[4] / "shared" / "data" / "mbpp.jsonl"))
    if not path.exists():
        pytest.skip("MBPP is not here: set SANDYARD_MBPP to its mbpp.jsonl")
    return [task_from_row(json.loads(line)) for line in path.read_text().splitlines()]


def wrong_solutions(tasks: Sequence[Task], seed: int = 0) -> list[str | None]:
    """A mutation of each reference that fails a test in CPython, None where none was found at once."""
    mutated = [mutate(task.reference or "", seed) for task in tasks]
    programs = ["\n".join([source, task.setup_code, *task.tests]) for task, source in zip(tasks, mutated, strict=True)]
    return [source if error else None for source, (_, error) in zip(mutated, run_in_cpython(programs), strict=True)]


async def rewards(verifier: Verifier, pairs: Sequence[tuple[Task, str]], at_once: int = 2) -> list[float | None]:
    """The reward of each solution; None where the back end does not support it."""
    room = asyncio.Semaphore(at_once)

    async def one(task: Task, solution: str) -> float | None:
        async with room:
            try:
                return await score(verifier, task, solution)
            except Unsupported:
                return None

    try:
        return await asyncio.gather(*(one(*pair) for pair in pairs))
    finally:
        await verifier.close()


def different(
    pairs: Sequence[tuple[Task, str]], found: Sequence[float | None], expected: Sequence[float | None]
) -> list[str]:
    return [
        f"task {task.task_id}: {ours} instead of {theirs}:\n{solution}"
        for (task, solution), ours, theirs in zip(pairs, found, expected, strict=True)
        if ours is not None and ours != theirs
    ]


async def test_right_and_wrong_solutions_score_as_in_cpython() -> None:
    tasks = chosen_tasks()
    pairs = [(task, source) for task in tasks for source in (task.reference, wrong_solutions([task])[0]) if source]
    found = await rewards(InterpreterVerifier(), pairs)
    expected = await rewards(local_verifier(), pairs)
    assert different(pairs, found, expected) == []
    assert found.count(1.0) == len(tasks)
    assert sum(reward is not None and reward < 1.0 for reward in found) >= 3


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_three_hundred_right_and_wrong_solutions_of_mbpp() -> None:
    tasks = mbpp_tasks()
    right = [(task, task.reference or "") for task in tasks[:300]]
    candidates = [
        (task, source)
        for seed in (1, 2)
        for task, source in zip(tasks, wrong_solutions(tasks, seed), strict=True)
        if source
    ]
    wrong = candidates[:300]
    for name, pairs in (("right", right), ("wrong", wrong)):
        assert len(pairs) == 300
        found = await rewards(InterpreterVerifier(), pairs)
        expected = await rewards(local_verifier(RunnerLimits(cpu_timeout=20)), pairs)
        kinds = Counter("unsupported" if reward is None else f"{reward:.2f}" for reward in found)
        print(name, dict(kinds))
        assert different(pairs, found, expected) == []
        assert sum(reward is not None for reward in found) >= 240
