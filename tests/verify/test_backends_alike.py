"""The same solutions scored on every back end: identical rewards, or a refusal, never another number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from sandyard.config import Settings
from sandyard.connection import Connection
from sandyard.images.base import build_base
from sandyard.server.embedded import EmbeddedServer
from sandyard.verify.base import Verifier
from sandyard.verify.code import CodeVerifier, SandboxLauncher
from sandyard.verify.interpreter import InterpreterVerifier
from sandyard.verify.local import local_verifier
from sandyard.verify.process import ProcessVerifier
from sandyard.verify.program import RunnerLimits
from tests.envs.interpreter.test_rewards import chosen_tasks, different, mbpp_tasks, rewards, wrong_solutions
from tests.yard import node_home, node_settings

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
PATIENT = RunnerLimits(cpu_timeout=20)  # a busy machine is no wrong solution


@pytest.fixture
def node() -> Iterator[EmbeddedServer]:
    with node_home() as home, EmbeddedServer(node_settings(home)) as server:
        yield server


def _verifiers(node: EmbeddedServer) -> dict[str, Verifier]:
    return {
        "interpreter": InterpreterVerifier(),
        "process": ProcessVerifier(limits=PATIENT),
        "sandbox": CodeVerifier(SandboxLauncher(Connection.to(node), template="base"), limits=PATIENT),
    }


async def test_a_few_solutions(node: EmbeddedServer) -> None:
    await build_base(Settings())
    tasks = chosen_tasks()[:12]
    pairs = [(task, source) for task in tasks for source in (task.reference, wrong_solutions([task])[0]) if source]
    expected = await rewards(local_verifier(PATIENT), pairs)
    for name, verifier in _verifiers(node).items():
        found = await rewards(verifier, pairs)
        assert different(pairs, found, expected) == [], name
        assert name == "interpreter" or None not in found


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_three_hundred_right_and_three_hundred_wrong_ones(node: EmbeddedServer) -> None:
    await build_base(Settings())
    tasks = mbpp_tasks()
    candidates = [
        (task, source)
        for seed in (1, 2)
        for task, source in zip(tasks, wrong_solutions(tasks, seed), strict=True)
        if source
    ]
    pairs = [(task, task.reference or "") for task in tasks[:300]] + candidates[:300]
    assert len(pairs) == 600
    expected = await rewards(local_verifier(PATIENT), pairs)
    for name, verifier in _verifiers(node).items():
        found = await rewards(verifier, pairs)
        assert different(pairs, found, expected) == [], name
        print(name, dict(Counter("unsupported" if reward is None else f"{reward:.2f}" for reward in found)))
        assert name == "interpreter" or None not in found
