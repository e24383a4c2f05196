"""Programs in CPython and in the guarded interpreter: what was not refused ends the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.envs.interpreter.differential import Comparison, compare
from tests.envs.interpreter.programs import SPECIALS, make_program
from tests.envs.interpreter.specials import SOURCE
from tests.envs.interpreter.test_rewards import mbpp_tasks

_PRELUDE = (
    "import math, re, heapq, itertools, functools, collections\nfrom collections import Counter, defaultdict, deque\n"
)


def assert_same(comparison: Comparison) -> None:
    assert comparison.different == [], "\n\n".join(comparison.different[:3])


def report(what: str, programs: Sequence[str], comparison: Comparison) -> None:
    refused = ", ".join(f"{name}: {count}" for name, count in comparison.refused.most_common(12))
    print(f"{what}: {len(programs)} programs, {dict(comparison.statuses)}; refused: {refused}")


async def test_every_special_piece_of_a_program_ends_as_in_cpython_or_is_refused() -> None:
    assert len(SPECIALS) == len(SOURCE.strip("\n").split("\n\n"))
    programs = [_PRELUDE + "\n".join(special("3", "[3, 1, 2]")) for special in SPECIALS]
    comparison = await compare(programs)
    assert_same(comparison)
    assert sum(comparison.accepted) > 0.8 * len(programs)


async def test_every_probe_ends_as_in_cpython_or_is_refused() -> None:
    probes = Path(__file__).with_name("probes.txt").read_text().strip("\n").split("\n---\n")
    comparison = await compare(probes)
    assert_same(comparison)
    assert sum(comparison.accepted) > 0.75 * len(probes)


async def test_generated_programs_end_as_in_cpython_or_are_refused() -> None:
    programs = [make_program(seed) for seed in range(120)]
    comparison = await compare(programs)
    assert_same(comparison)
    assert sum(comparison.accepted) > 0.75 * len(programs)


async def test_the_comparison_sees_a_difference() -> None:
    """Programs whose outcome depends on the process that runs them differ, and are reported."""
    comparison = await compare(["import time\nprint(time.perf_counter())"])
    assert len(comparison.different) == 1


async def test_output_beyond_the_limit_is_compared_as_far_as_it_is_kept() -> None:
    comparison = await compare(["print('abc' * 1_000_000)"])
    assert comparison.different == []


@pytest.mark.full
@pytest.mark.timeout(3000)
async def test_ten_thousand_generated_programs() -> None:
    programs = [make_program(seed) for seed in range(10_000, 20_000)]
    comparison = await compare(programs)
    report("generated", programs, comparison)
    assert_same(comparison)
    assert sum(comparison.accepted) > 0.8 * len(programs)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_every_reference_solution_of_mbpp_with_its_tests() -> None:
    programs = ["\n".join([task.reference or "", task.setup_code, *task.tests]) for task in mbpp_tasks()]
    comparison = await compare(programs)
    report("MBPP", programs, comparison)
    assert_same(comparison)
    assert sum(comparison.accepted) > 0.95 * len(programs)
