"""The container runtime keeps the contract; the contract itself is not empty."""

from __future__ import annotations

import pytest

from sandyard.runtimes.base import Rootfs
from sandyard.runtimes.conformance import CHECKS, CheckResult, run_conformance, summary
from sandyard.runtimes.container import ContainerRuntime


@pytest.mark.root
@pytest.mark.timeout(600)
async def test_the_container_runtime_conforms(runtime: ContainerRuntime, base: Rootfs) -> None:
    heard: list[CheckResult] = []
    results = await run_conformance(runtime, base, on_result=heard.append)
    assert [f"{each.name}: {each.detail}" for each in results if each.ok is False] == []
    assert heard == results
    assert len(results) == len(CHECKS)
    assert sum(each.ok is True for each in results) >= 80


@pytest.mark.root
async def test_a_check_that_fails_is_a_result(runtime: ContainerRuntime, empty: Rootfs) -> None:
    results = await run_conformance(runtime, empty, only=["an exit code is told", "the agent is PID 1"])
    assert [each.ok for each in results] == [False, False]  # there is no bash in an empty root
    assert "bash" in results[0].detail
    assert await runtime.list() == []


def test_checks_have_names_of_their_own() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS) >= 40


def test_the_summary_counts() -> None:
    results = [CheckResult(str(n), ok, "", 0.0) for n, ok in enumerate((True, True, False, None))]
    assert summary(results) == "2 passed, 1 failed, 1 not applicable"
    assert summary(results[:2]) == "2 passed, 0 failed"
