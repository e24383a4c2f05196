"""One row in the MBPP format, as a `Task`. Line ends `\\r\\n` become `\\n`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandyard.tasks.base import Task

_USED = frozenset({"text", "prompt", "code", "task_id", "test_setup_code", "test_list", "test_imports", "family"})


class RowError(ValueError):
    """A row that is not a task; the message names the field."""


def task_from_row(row: object) -> Task:
    """Make the task of one row. Raises `RowError` naming the field at fault.

    `test_setup_code` and `test_imports` become `setup_code`; `challenge_test_list` stays in the
    metadata, since the set's own scores do not use it.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"an object is expected, not {type(row).__name__}")
    tests = _strings(row, "test_list")
    if not tests:
        raise RowError("field test_list: at least one test is needed")
    setup = [*_strings(row, "test_imports", optional=True), _text(row, "test_setup_code", optional=True)]
    return Task(
        task_id=_task_id(row),
        prompt=_prompt(row),
        tests=tuple(tests),
        setup_code="\n".join(part for part in setup if part.strip()),
        reference=_text(row, "code", optional=True) or None,
        family=_text(row, "family", optional=True),
        metadata={key: value for key, value in row.items() if key not in _USED},
    )


def row_from_task(task: Task) -> dict[str, Any]:
    """The row of a task, in the original set's field names: `task_from_row` reads it back."""
    row: dict[str, Any] = {
        **task.metadata,
        "task_id": task.task_id,
        "text": task.prompt,
        "code": task.reference or "",
        "test_setup_code": task.setup_code,
        "test_list": list(task.tests),
    }
    row.setdefault("challenge_test_list", [])
    return {**row, "family": task.family} if task.family else row


def _task_id(row: Mapping[str, Any]) -> str:
    value = row.get("task_id")
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise RowError(f"field task_id: a number or a text is needed, not {_shown(value)}")
    return str(value)


def _prompt(row: Mapping[str, Any]) -> str:
    field = "text" if row.get("text") is not None else "prompt"
    if row.get(field) is None:
        raise RowError("field text (or prompt) is missing")
    prompt = _text(row, field)
    if not prompt.strip():
        raise RowError(f"field {field} is empty")
    return prompt


def _text(row: Mapping[str, Any], field: str, *, optional: bool = False) -> str:
    value = row.get(field)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise RowError(f"field {field}: a text is needed, not {_shown(value)}")
    return value.replace("\r\n", "\n")


def _strings(row: Mapping[str, Any], field: str, *, optional: bool = False) -> Sequence[str]:
    value = row.get(field)
    if value is None and optional:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"field {field}: a list of texts is needed, not {_shown(value)}")
    return [item.replace("\r\n", "\n") for item in value]


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
