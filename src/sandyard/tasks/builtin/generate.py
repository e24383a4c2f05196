"""Makes the built-in tasks: every (family, parameter) pair once, with hidden tests and a split."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

from sandyard.errors import BadRequest
from sandyard.tasks.base import Task
from sandyard.tasks.builtin.families import FAMILIES, PARAMETERS, Family

Split = Literal["train", "heldout", "all"]

HELD_OUT_EVERY = 5
_FIRST = ("calm", "bold", "tiny", "warm", "fast", "deep", "pale", "wild", "dry", "soft", "late", "old")
_SECOND = ("owl", "fox", "pine", "lake", "hill", "moss", "fern", "crow", "reed", "hare", "stone", "wave")
FUNCTION_NAMES: tuple[str, ...] = tuple(f"{first}_{second}" for first in _FIRST for second in _SECOND)


def builtin_tasks(split: Split = "all", seed: int = 0) -> list[Task]:
    """The built-in tasks: 12 families of 30 parameters each, the same list for the same seed.

    No held-out (family, parameter) pair occurs in training, but every family and every parameter
    does. `seed` draws function names, wording, test inputs and which pairs are held out. The names
    carry no hint of the operation. Raises `BadRequest` for an unknown split.
    """
    if split not in ("train", "heldout", "all"):
        raise BadRequest(f"unknown split {split!r}", field="split", remedy="use train, heldout or all")
    tasks = list(_all(seed))
    return tasks if split == "all" else [task for task in tasks if task.metadata["split"] == split]


def _all(seed: int) -> Iterator[Task]:
    rng = random.Random(f"sandyard-builtin-{seed}")
    # A diagonal through the (family, parameter) table: no parameter and no family is held out whole.
    offset = rng.randrange(HELD_OUT_EVERY)
    for row, family in enumerate(FAMILIES):
        for k in PARAMETERS:
            held_out = (k + 2 * row + offset) % HELD_OUT_EVERY == 0
            yield _task(family, k, "heldout" if held_out else "train", rng)


def _task(family: Family, k: int, split: str, rng: random.Random) -> Task:
    function = rng.choice(FUNCTION_NAMES)
    reference = family.solution(function, k)
    return Task(
        task_id=f"{family.name}_{k}",
        prompt=family.prompt(function, k, rng.randrange(len(family.phrases))),
        tests=tuple(_test(function, argument, reference) for argument in family.inputs(k, rng)),
        reference=reference,
        family=family.name,
        metadata={"parameter": k, "function": function, "split": split},
    )


def _test(function: str, argument: object, reference: str) -> str:
    namespace: dict[str, Any] = {}
    exec(reference, namespace)  # the generator's own text, never a policy's
    return f"assert {function}({argument!r}) == {namespace[function](argument)!r}"
