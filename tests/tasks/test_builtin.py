"""The built-in tasks: what a user can rely on about counts, split and hidden tests."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from sandyard.errors import BadRequest
from sandyard.tasks.base import Task
from sandyard.tasks.builtin import FAMILIES, PARAMETERS, builtin_tasks
from sandyard.tasks.builtin.families import BY_NAME
from sandyard.tasks.mbpp import row_from_task, task_from_row


def passes(task: Task, solution: str) -> list[bool]:
    outcomes = []
    for test in task.tests:
        namespace: dict[str, Any] = {}
        exec(solution, namespace)
        try:
            exec(test, namespace)
            outcomes.append(True)
        except (AssertionError, IndexError):
            outcomes.append(False)
    return outcomes


@pytest.mark.parametrize("seed", [0, 1])
def test_there_are_many_tasks_and_the_split_is_by_pairs(seed: int) -> None:
    train, held_out = builtin_tasks("train", seed), builtin_tasks("heldout", seed)
    assert len(train) + len(held_out) == len(builtin_tasks("all", seed)) >= 300
    assert len(held_out) >= 60
    pairs = [{(t.family, t.metadata["parameter"]) for t in part} for part in (train, held_out)]
    assert not pairs[0] & pairs[1]
    for part in pairs:
        assert {family for family, _ in part} == {family.name for family in FAMILIES}
    assert {k for _, k in pairs[0]} == set(PARAMETERS)
    assert len(FAMILIES) >= 8


def test_ids_are_unique_and_the_prompt_names_function_and_parameter() -> None:
    tasks = builtin_tasks()
    assert len({task.task_id for task in tasks}) == len(tasks)
    for task in tasks:
        assert task.metadata["function"] in task.prompt
        assert str(task.metadata["parameter"]) in task.prompt
        assert len(task.tests) >= 3


def test_the_same_seed_gives_the_same_tasks_and_another_gives_others() -> None:
    assert builtin_tasks(seed=3) == builtin_tasks(seed=3)
    assert builtin_tasks(seed=3) != builtin_tasks(seed=4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_references_pass_and_near_misses_fail(seed: int) -> None:
    passed_by_wrong: dict[str, list[float]] = defaultdict(list)
    for task in builtin_tasks(seed=seed):
        family, function, k = BY_NAME[task.family], task.metadata["function"], task.metadata["parameter"]
        assert task.reference is not None
        assert all(passes(task, task.reference))
        for expression in family.wrong:
            outcomes = passes(task, family.solution(function, k, expression))
            assert not all(outcomes), (task.task_id, expression)
            passed_by_wrong[task.family].append(sum(outcomes) / len(outcomes))
        for other in (k - 1, k + 1):
            assert not all(passes(task, family.solution(function, other))), (task.task_id, other)
    for family_name, rates in passed_by_wrong.items():
        assert sum(rates) / len(rates) <= 0.5, family_name


def test_no_other_family_solves_a_task() -> None:
    for task in builtin_tasks():
        function, k = task.metadata["function"], task.metadata["parameter"]
        own = BY_NAME[task.family]
        for family in FAMILIES:
            if family is not own and family.argument == own.argument:
                assert not all(passes(task, family.solution(function, k))), (task.task_id, family.name)


def test_a_trial_line_runs_for_every_family_and_near_miss() -> None:
    for family in FAMILIES:
        for k in PARAMETERS:
            for expression in (family.right, *family.wrong):
                program = family.solution("f", k, expression) + "\n" + family.trial("f").replace("print", "str", 1)
                exec(program, {})


def test_a_task_survives_a_file_in_the_mbpp_format() -> None:
    for task in builtin_tasks():
        row = json.loads(json.dumps(row_from_task(task)))
        assert {"task_id", "text", "code", "test_setup_code", "test_list", "challenge_test_list"} <= set(row)
        read = task_from_row(row)
        assert (read.task_id, read.prompt, read.tests, read.reference, read.family) == (
            task.task_id, task.prompt, task.tests, task.reference, task.family,
        )  # fmt: skip


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(BadRequest, match="split"):
        builtin_tasks("test")  # type: ignore[arg-type]
