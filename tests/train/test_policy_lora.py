from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.errors import HostError
from sandyard.train.policies.base import SamplingParams
from sandyard.train.policies.loading import load_policy, with_lora
from sandyard.train.policies.transformers import TransformersPolicy
from sandyard.train.reference import freeze_reference
from sandyard.train.runlog import read_metrics
from tests.train.test_trainer import CONFIG, make_trainer
from tests.train.tiny import make_model, make_policy, make_tokenizer

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def policy() -> TransformersPolicy:
    pytest.importorskip("peft")
    tokenizer = make_tokenizer()
    return TransformersPolicy(with_lora(make_model(tokenizer), 4), tokenizer)


async def test_only_adapters_train_and_the_reference_is_the_model_without_them(
    policy: TransformersPolicy, tmp_path: Path
) -> None:
    total = sum(parameter.numel() for parameter in policy.model.parameters())
    assert 0 < sum(parameter.numel() for parameter in policy.parameters()) < total / 2
    frozen = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    before, _ = policy.logprobs(ids, torch.ones_like(ids))
    config = replace(CONFIG, beta=0.01, learning_rate=1e-2)
    await make_trainer(tmp_path, config, policy).train()
    assert read_metrics(tmp_path)[-1]["train/kl"] > 0
    assert all(torch.equal(p, frozen[n]) for n, p in policy.model.named_parameters() if n in frozen)
    after, _ = policy.logprobs(ids, torch.ones_like(ids))
    assert not torch.allclose(before, after, atol=1e-4)
    reference = freeze_reference(policy, 1.0)([[1]], [[2, 3, 4, 5]])
    assert torch.allclose(reference, before, atol=1e-5)


async def test_sampling_sees_the_adapters_and_saving_merges_them(policy: TransformersPolicy, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.2)
    generation = await policy.generate([1, 2, 3], SamplingParams(8, 1.0, 0))
    ids = torch.tensor([[1, 2, 3, *generation.token_ids]])
    logps = policy.logprobs(ids, torch.ones_like(ids))[0][0, 2:].detach()
    assert torch.allclose(logps, torch.tensor(generation.logprobs), atol=1e-4)
    plain = await make_policy().generate([1, 2, 3], SamplingParams(8, 1.0, 0))
    assert plain.logprobs != generation.logprobs
    policy.save(tmp_path)
    merged = load_policy(tmp_path).logprobs(ids, torch.ones_like(ids))[0][0, 2:].detach()
    assert torch.allclose(merged, logps, atol=1e-4)


def test_without_peft_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "peft":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(HostError, match="pip install peft, or leave --lora-rank at 0"):
        with_lora(None, 4)
