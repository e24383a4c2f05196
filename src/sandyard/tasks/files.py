"""Task files: JSONL, JSON or parquet rows in the MBPP format, one `Task` a row.

A row has the field names of the original set (`text code task_id test_setup_code test_list
challenge_test_list`) or of the sanitized one (`prompt code task_id test_imports test_list`); the
two may be mixed. `family` (a string) groups tasks in reports; every other field goes to `metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from sandyard.errors import TaskError
from sandyard.tasks.base import Task
from sandyard.tasks.mbpp import RowError, task_from_row

TaskFormat = Literal["auto", "jsonl", "json", "parquet"]
_BY_SUFFIX: Mapping[str, TaskFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


def load_tasks(path: Path | str, format: TaskFormat = "auto", limit: int | None = None) -> list[Task]:
    """Load the tasks of a file, in its order; with `limit`, the first so many.

    Raises `TaskError` naming file, line (or row) and field: a row that does not parse, a field that
    is missing or of the wrong type, a duplicate id, a file without tasks.
    """
    path = Path(path)
    rows = _read_rows(path, _choose_format(path, format))
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for where, row in rows:
        if limit is not None and len(tasks) >= limit:
            break
        try:
            task = task_from_row(row)
        except RowError as error:
            raise TaskError(f"{path}, {where}: {error}") from error
        if task.task_id in seen:
            raise TaskError(
                f"{path}, {where}: field task_id: {task.task_id!r} is already taken by {seen[task.task_id]}"
            )
        seen[task.task_id] = where
        tasks.append(task)
    if not tasks and limit != 0:
        raise TaskError(f"{path}: no tasks in it")
    return tasks


def _choose_format(path: Path, format: TaskFormat) -> TaskFormat:
    if format != "auto":
        return format
    chosen = _BY_SUFFIX.get(path.suffix.lower())
    if chosen is None:
        known = ", ".join(_BY_SUFFIX)
        raise TaskError(
            f"{path}: cannot tell the format from the name", remedy=f"name it one of {known} or say format="
        )
    return chosen


def _read_rows(path: Path, format: TaskFormat) -> Iterator[tuple[str, object]]:
    if not path.is_file():
        raise TaskError(f"task file {path} does not exist")
    if format == "parquet":
        return _parquet_rows(path)
    text = _read_text(path)
    return _json_rows(path, text) if format == "json" else _jsonl_rows(path, text)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror or error}") from error


def _jsonl_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    # Not splitlines(): U+2028 and its kin are legal inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise TaskError(f"{path}, line {number}: not JSON: {error}") from error


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(document, list):
        raise TaskError(f"{path}: a list of tasks is expected, not {type(document).__name__}")
    return _numbered(document)


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.lib
        import pyarrow.parquet
    except ImportError as error:
        raise TaskError(f"{path}: parquet needs pyarrow", remedy="pip install 'sandyard[data]'") from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.lib.ArrowException, OSError) as error:
        raise TaskError(f"{path}: not a parquet file that can be read: {error}") from error
    return _numbered(rows)


def _numbered(rows: Iterable[object]) -> Iterator[tuple[str, object]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, 1))
