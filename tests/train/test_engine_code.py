"""The engine over a real code env and the real verifier, with programs that run."""

from __future__ import annotations

import os

import pytest

from sandyard.envs.backends.memory import make_env, system_prompt
from sandyard.tasks.base import Task
from sandyard.train.episode import system_and_user
from sandyard.train.policies.chat import render_call
from sandyard.train.rollout import RolloutConfig, RolloutEngine
from sandyard.train.testing import ScriptedPolicy
from sandyard.verify.local import local_verifier

TASK = Task("add", "Write add(a, b).", tests=("assert add(1, 2) == 3", "assert add(-1, 1) == 0"), family="add")


@pytest.mark.skipif(os.geteuid() != 0, reason="the verifier's processes change their user: run as root")
@pytest.mark.parametrize(
    ("solution", "reward"),
    [
        ("def add(a, b):\n    return a + b", 1.0),
        ("def add(a, b):\n    return 3", 0.3),
        ("def add(a, b):\n    raise ValueError", 0.1),
        (None, 0.0),
    ],
)
async def test_a_program_is_run_observed_and_scored(solution: str | None, reward: float) -> None:
    last = "I give up." if solution is None else render_call("submit_solution", {"code": solution})
    policy = ScriptedPolicy([render_call("run_python", {"code": "print(6 * 7)"}), last])
    verifier = local_verifier()
    build = system_and_user(system_prompt(max_turns=4))
    engine = RolloutEngine(policy, make_env, verifier, build, RolloutConfig(max_tokens=400))
    try:
        (trajectory,) = await engine.run([TASK])
    finally:
        await verifier.close()
    assert (trajectory.masked, trajectory.detail) == (None, None)
    assert trajectory.reward == pytest.approx(reward)
    assert "tool: 42" in policy.decode(trajectory.token_ids)
    assert trajectory.solved == (reward == 1.0)
