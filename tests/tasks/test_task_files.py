"""Task files: what they give, and what is said of a bad line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandyard.errors import TaskError
from sandyard.tasks.base import Task
from sandyard.tasks.files import load_tasks
from sandyard.tasks.humaneval import load_humaneval
from sandyard.tasks.mbpp import row_from_task, task_from_row

ORIGINAL = {
    "text": "Add.",
    "code": "def add(a, b):\r\n    return a + b",
    "task_id": 7,
    "test_setup_code": "import math\r\n",
    "test_list": ["assert add(1, 2) == 3\r\n"],
    "challenge_test_list": ["assert add(0, 0) == 0"],
}
SANITIZED = {
    "prompt": "Add.",
    "code": "def add(a, b): return a + b",
    "task_id": 8,
    "test_imports": ["import math", "import re"],
    "test_list": ["assert add(1, 2) == 3"],
}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_field_sets(tmp_path: Path) -> None:
    original, sanitized = load_tasks(write(tmp_path / "t.jsonl", ORIGINAL, SANITIZED))
    assert original == Task(
        task_id="7",
        prompt="Add.",
        tests=("assert add(1, 2) == 3\n",),
        setup_code="import math\n",
        reference="def add(a, b):\n    return a + b",
        metadata={"challenge_test_list": ["assert add(0, 0) == 0"]},
    )
    assert sanitized.setup_code == "import math\nimport re"


def test_every_format_reads_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [ORIGINAL, {**ORIGINAL, "task_id": 9, "family": "sums"}]
    rows[0] = {**ORIGINAL, "family": ""}
    lines = load_tasks(write(tmp_path / "t.jsonl", *rows))
    (tmp_path / "t.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert load_tasks(tmp_path / "t.json") == load_tasks(tmp_path / "t.parquet") == lines
    assert lines[1].family == "sums"
    (tmp_path / "crlf").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.jsonl").read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert load_tasks(tmp_path / "crlf", format="jsonl") == lines
    assert load_tasks(tmp_path / "t.jsonl", limit=1) == lines[:1]


def test_a_task_survives_its_row() -> None:
    task = task_from_row({**ORIGINAL, "family": "sums", "source": "x"})
    assert task_from_row(row_from_task(task)) == task


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in ORIGINAL.items() if key != field}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([1], "line 2: an object is expected, not list"),
        (without("text"), "line 2: field text (or prompt) is missing"),
        ({**ORIGINAL, "text": " "}, "line 2: field text is empty"),
        ({**ORIGINAL, "text": 3}, "line 2: field text: a text is needed, not 3"),
        (without("task_id"), "line 2: field task_id: a number or a text is needed, not nothing"),
        ({**ORIGINAL, "task_id": True}, "line 2: field task_id"),
        (without("test_list"), "line 2: field test_list: a list of texts is needed, not nothing"),
        ({**ORIGINAL, "test_list": []}, "line 2: field test_list: at least one test is needed"),
        ({**ORIGINAL, "test_list": "assert 1"}, "line 2: field test_list"),
        ({**ORIGINAL, "test_list": [1]}, "line 2: field test_list"),
        ({**SANITIZED, "test_imports": "import re"}, "line 2: field test_imports"),
        ({**SANITIZED, "code": 1}, "line 2: field code"),
        (SANITIZED, "line 2: field task_id: '8' is already taken by line 1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, text: str) -> None:
    path = write(tmp_path / "t.jsonl", SANITIZED, row)
    with pytest.raises(TaskError) as caught:
        load_tasks(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("t.jsonl", b'{"a": 1}\n{"a": \n', "line 1"),
        ("t.jsonl", json.dumps(SANITIZED).encode() + b"\n\n{nope\n", "line 3: not JSON"),
        ("t.jsonl", b"\xff\xfe", "byte 0 is not UTF-8"),
        ("t.jsonl", b"\n", "no tasks in it"),
        ("t.json", b'[\n{"a": 1,}\n]', "line 2: not JSON"),
        ("t.json", b"{}", "a list of tasks is expected, not dict"),
        ("t.json", b"[{}]", "row 1: field test_list"),
        ("t.parquet", b"PAR0", "not a parquet file"),
        ("t.txt", b"", "cannot tell the format"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError) as caught:
        load_tasks(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert text in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="does not exist"):
        load_tasks(tmp_path / "none.jsonl")


def data_file(name: str) -> Path:
    """A file of `$SANDYARD_DATA`, else of the data folder beside the project."""
    root = Path(os.environ.get("SANDYARD_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not (root / name).exists():
        pytest.skip(f"{name} is not in {root}: set SANDYARD_DATA")
    return root / name


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (lambda: load_tasks(data_file("mbpp.jsonl")), 974),
        (lambda: load_tasks(data_file("sanitized-mbpp.json")), 427),
        (load_humaneval, 164),
    ],
)
def test_the_public_sets_load(load: Callable[[], list[Task]], count: int) -> None:
    tasks = load()
    assert len(tasks) == count
    assert all(task.tests and task.reference and "\r\n" not in task.reference for task in tasks)


def test_humaneval_helpers_are_setup_and_no_answer() -> None:
    tasks = {task.task_id: task for task in load_humaneval()}
    assert "def poly" in tasks["HumanEval/32"].setup_code
    assert "def find_zero" not in tasks["HumanEval/32"].setup_code
    assert tasks["HumanEval/32"].tests[0].endswith("check(find_zero)")
    assert len(load_humaneval(limit=3)) == 3
