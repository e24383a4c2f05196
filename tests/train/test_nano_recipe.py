"""The code_rl recipe, run as `sandyard train` runs it, on the back end that needs no server."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from sandyard.cli.train import load_recipe
from sandyard.connection import Connection
from sandyard.errors import ConfigError, TaskError
from sandyard.tasks.builtin import builtin_tasks
from sandyard.tasks.mbpp import row_from_task

RECIPE = Path(__file__).parents[2] / "recipes" / "code_rl"
NOWHERE = Connection("http://127.0.0.1:9", "none", "http://127.0.0.1:9")
SMALL = {
    "batch_size": 2, "num_generations": 2, "max_steps": 1, "max_tokens": 24, "max_turns": 2,
    "eval_samples": 1, "eval_tasks": 2, "warm_start_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe(RECIPE)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("CODE_RL_BACKEND", "memory")
    # One cache for the module: a warm start of this size is made once.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "nano-cache"))


def run(recipe: ModuleType, **settings: Any) -> tuple[Any, str]:
    console = Console(file=io.StringIO(), width=100)
    config = dataclasses.replace(recipe.CONFIG, **settings)
    result = asyncio.run(recipe.run(config, server=NOWHERE, console=console))
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


@pytest.mark.timeout(180)
def test_a_run_leaves_its_files_and_says_where_they_are(recipe: ModuleType, tmp_path: Path) -> None:
    result, printed = run(recipe, run_dir=tmp_path / "run", **SMALL)
    assert result.report_path.is_file()
    for name in ("metrics", "trajectories", "before", "after", "before-greedy", "after-greedy"):
        assert (result.run_dir / f"{name}.jsonl").is_file()
    assert result.before.total.tasks == result.after.total.tasks == 2
    for said in ("before", "after", str(result.report_path), "show.py"):
        assert said in printed.replace("\n", "")
    lines = (result.run_dir / "trajectories.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "Tools: run_python(code), submit_solution(code)." in json.loads(lines[0])["prompt"]


@pytest.mark.timeout(180)
def test_a_file_of_tasks_is_split_and_its_first_test_shown(recipe: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [row_from_task(task) for task in builtin_tasks()[:10]]
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "function"}) + "\n" for row in rows))
    result, _ = run(recipe, run_dir=tmp_path / "run", tasks=str(file), **SMALL)
    played = [json.loads(line) for line in (result.run_dir / "trajectories.jsonl").read_text().splitlines()]
    assert all("It must satisfy: assert " in line["prompt"] for line in played)
    held_out = {json.loads(line)["task_id"] for line in (result.run_dir / "before.jsonl").read_text().splitlines()}
    assert not held_out & {line["task_id"] for line in played}


def test_a_file_with_one_task_is_refused(recipe: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row_from_task(builtin_tasks()[0])) + "\n")
    with pytest.raises(TaskError, match=r"tasks\.jsonl"):
        run(recipe, tasks=str(file), run_dir=tmp_path / "run", **SMALL)


def test_an_unknown_back_end_is_refused_by_name(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CODE_RL_BACKEND", "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        run(recipe, run_dir=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_lifts_the_nano_policy(recipe: ModuleType, tmp_path: Path, seed: int) -> None:
    result, _ = run(recipe, run_dir=tmp_path / "run", seed=seed)
    assert 0.2 <= result.before.pass_at_1 <= 0.5
    assert result.after.pass_at_1 >= 0.85


def test_a_used_run_directory_is_refused_and_untouched(recipe: ModuleType, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "before.jsonl"):
        (tmp_path / name).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run(recipe, run_dir=tmp_path, **SMALL)
    with pytest.raises(ConfigError, match="no run to resume"):
        run(recipe, resume=tmp_path / "none", **SMALL)
    assert (tmp_path / "before.jsonl").exists()
