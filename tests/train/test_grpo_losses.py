"""Our losses against TRL's own, on the same model and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.errors import ConfigError
from sandyard.train.losses import LossConfig, k3, loss_sum, normalizer, policy_loss, ratios, token_losses
from sandyard.train.metrics import clip_ratio, masked_mean
from sandyard.train.policies.transformers import model_logprobs
from tests.train.tiny import make_model, make_tokenizer

PROMPT, COMPLETION, ROWS = 5, 9, 6


def trl_trainer(tmp_path: Path, model: Any, tokenizer: Any, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=ROWS,
        num_generations=ROWS,
        max_completion_length=COMPLETION,
        gradient_accumulation_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        **settings,
    )
    data = Dataset.from_dict({"prompt": ["a"] * ROWS})
    return GRPOTrainer(model, lambda **_: [0.0], arguments, data, processing_class=tokenizer)


def make_inputs(tokenizer: Any, model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 4, 7, 9, 1, 6])
    completion_mask = (torch.arange(COMPLETION) < lengths[:, None]).long()
    tool_mask = torch.ones_like(completion_mask)
    tool_mask[0, 3:5] = 0
    inputs = {
        "prompt_ids": torch.randint(0, 250, (ROWS, PROMPT), generator=generator),
        "prompt_mask": torch.ones((ROWS, PROMPT), dtype=torch.long),
        "completion_ids": torch.randint(0, 250, (ROWS, COMPLETION), generator=generator),
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1, 0.9, -0.2]),
    }
    inputs["num_items_in_batch"] = (completion_mask * tool_mask).sum()
    with torch.no_grad():
        logps = completion_logps(model, inputs)
    noise = torch.randn(logps.shape, generator=generator)
    inputs["old_per_token_logps"] = logps + 0.3 * noise
    inputs["ref_per_token_logps"] = logps + 0.2 * noise.flip(0)
    return inputs


def completion_logps(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    return model_logprobs(model, ids, attention)[0][:, PROMPT - 1 :]


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("beta", "kl_times_ratio"), [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("epsilon_high", [None, 0.28])
def test_loss_and_gradient_agree_with_trl(
    tmp_path: Path, loss_type: str, beta: float, kl_times_ratio: bool, epsilon_high: float | None
) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    trainer = trl_trainer(
        tmp_path,
        model,
        tokenizer,
        loss_type=loss_type,
        epsilon_high=epsilon_high,
        use_bias_correction_kl=kl_times_ratio,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = beta  # set here: the constructor would look for a reference model by the model's name
    inputs = make_inputs(tokenizer, model)
    model.train()
    theirs = trainer._compute_loss(model, inputs)
    their_gradient = gradient(model, theirs)
    config = LossConfig(loss_type, 0.2, epsilon_high, beta, kl_times_ratio, COMPLETION)
    logps = completion_logps(model, inputs)
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).float()
    old, reference = inputs["old_per_token_logps"], inputs["ref_per_token_logps"]
    ours = policy_loss(logps, old, inputs["advantages"], mask, config, reference)
    assert abs(float(ratios(logps, old).mean()) - 1) > 1e-3
    assert float(ours) == pytest.approx(float(theirs), abs=1e-5)
    our_gradient = gradient(model, ours)
    assert float((our_gradient - their_gradient).abs().max()) < 1e-5
    assert float(our_gradient.abs().max()) > 1e-3
    clipped = clip_ratio(ratios(logps, old), inputs["advantages"], mask, config)
    assert clipped == pytest.approx(trainer._metrics["train"]["clip_ratio/region_mean"][-1], abs=1e-6)
    assert clipped > 0


def test_micro_batches_accumulate_to_the_loss_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn((6, 5), generator=generator) * 0.2 - 1 for _ in range(2))
    mask = (torch.rand((6, 5), generator=generator) > 0.3).float()
    advantages = torch.randn(6, generator=generator)
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        config = LossConfig(loss_type)
        whole = policy_loss(new, old, advantages, mask, config)
        parts = [
            loss_sum(token_losses(new[s], old[s], advantages[s], config), mask[s], config) / normalizer(mask, config)
            for s in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-6)


def test_masked_positions_do_not_count() -> None:
    mask = torch.tensor([[1.0, 0.0]])
    new = torch.tensor([[-1.0, -5.0]], requires_grad=True)
    loss = policy_loss(new, torch.tensor([[-1.0, 3.0]]), torch.tensor([1.0]), mask, LossConfig("dapo"))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss) == -1.0
    assert new.grad is not None
    assert new.grad[0, 1] == 0


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    base = torch.tensor([-1.0, -2.0])
    assert k3(base, base).tolist() == [0.0, 0.0]
    assert (k3(base, base + torch.tensor([0.5, -0.5])) > 0).all()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="ppo"):
        LossConfig("ppo")
    with pytest.raises(ConfigError, match="epsilon"):
        LossConfig(epsilon=0.0)
    with pytest.raises(ConfigError, match="reference"):
        token_losses(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), LossConfig(beta=0.1))


def test_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.ones(2, 2), torch.zeros(2, 2)) == 0.0
