"""Which tasks are trained on, and which are held out to measure on."""

from __future__ import annotations

import random
from pathlib import Path

from sandyard.errors import TaskError
from sandyard.tasks.base import Task
from sandyard.tasks.builtin import builtin_tasks
from sandyard.tasks.files import load_tasks
from sandyard.train.policies.base import Message

from .config import RecipeConfig

_HELD_OUT_EVERY = 5
_HELD_OUT_MOST = 72


def choose_tasks(config: RecipeConfig) -> tuple[list[Task], list[Task]]:
    """(train, held out). The built-in set has its own split; of a file's tasks a fifth, 72 at most, is held
    out by `seed`. Raises `TaskError` for a file with fewer than two tasks."""
    if config.tasks:
        train, held_out = _split_file(Path(config.tasks), config.seed)
    else:
        train, held_out = builtin_tasks("train"), builtin_tasks("heldout")
    if config.eval_tasks:
        held_out = random.Random(config.seed).sample(held_out, min(config.eval_tasks, len(held_out)))
    return train, held_out


def _split_file(path: Path, seed: int) -> tuple[list[Task], list[Task]]:
    tasks = load_tasks(path)
    if len(tasks) < 2:
        raise TaskError(f"{path}: one task cannot be split into train and held out", remedy="give a file with more")
    random.Random(seed).shuffle(tasks)
    count = min(_HELD_OUT_MOST, max(1, len(tasks) // _HELD_OUT_EVERY))
    return tasks[count:], tasks[:count]


def user_message(task: Task) -> Message:
    """The task as the policy reads it. Where the text does not name the function, the first test does."""
    named = "function" in task.metadata
    text = task.prompt if named or not task.tests else f"{task.prompt}\nIt must satisfy: {task.tests[0]}"
    return {"role": "user", "content": text}
