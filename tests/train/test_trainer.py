from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.envs.base import StepStatus
from sandyard.errors import (
    BadRequest,
    CapacityError,
    ConfigError,
    DeathReason,
    SandboxDied,
    SandyardError,
    Unauthorized,
)
from sandyard.train.batching import Sample, collate, micro_batches
from sandyard.train.checkpoint import list_checkpoints
from sandyard.train.config import TrainConfig
from sandyard.train.episode import system_and_user
from sandyard.train.losses import LossConfig
from sandyard.train.metrics import NAMES, policy_health, rollout_metrics, weighted_mean
from sandyard.train.policies.base import Policy
from sandyard.train.policies.chat import render_call
from sandyard.train.runlog import read_metrics
from sandyard.train.seeds import derive_seed, task_order
from sandyard.train.testing import ScriptedPolicy
from sandyard.train.trainer import GRPOTrainer, TrainEvent, TrainingStopped
from sandyard.train.trajectory import Call, EndReason, Timings, Trajectory, read_lines
from sandyard.train.update import Updater
from sandyard.verify.base import Verdict
from sandyard.verify.shaping import shape_reward
from tests.train.tiny import FakeEnv, FakeVerifier, make_policy, make_tasks

CONFIG = TrainConfig(
    batch_size=2, num_generations=4, max_steps=4, max_tokens=6, max_turns=1, learning_rate=1e-3, save_steps=2
)


class LengthVerifier(FakeVerifier):
    """A reward that a random policy earns in different amounts: by turn, whatever it says."""

    def __init__(self, pattern: Sequence[int] = (0, 1, 2, 1, 2)) -> None:
        super().__init__()
        self._pattern = pattern

    async def verify(self, task: Any, solution: str | None) -> Verdict:
        self.calls += 1
        return Verdict(True, self._pattern[self.calls % len(self._pattern)], 2)


def make_trainer(
    run_dir: Path,
    config: TrainConfig = CONFIG,
    policy: Policy | None = None,
    env: Callable[[], FakeEnv] = FakeEnv,
    verifier: FakeVerifier | None = None,
    **options: Any,
) -> GRPOTrainer:
    return GRPOTrainer(
        policy or make_policy(),
        make_tasks(5),
        env,
        verifier or LengthVerifier(),
        config,
        build_messages=system_and_user("S."),
        run_dir=run_dir,
        **options,
    )


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])


async def test_a_run_learns_and_logs_every_metric_by_its_name(tmp_path: Path) -> None:
    events: list[TrainEvent] = []
    trainer = make_trainer(tmp_path, on_event=events.append)
    before = weights(trainer.policy)
    await trainer.train()
    assert float((weights(trainer.policy) - before).abs().max()) > 1e-4
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        # A random policy calls no tool: nothing was executed.
        assert [name for name in NAMES if name not in line] == ["env/exec_p50"]
        assert all(math.isfinite(value) for value in line.values())
        assert line["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert line["train/clip_ratio"] == 0.0
        assert line["train/entropy"] > 0
    assert [event.kind for event in events if event.kind != "rollout"] == ["step", "step", "checkpoint"] * 2
    assert sum(event.kind == "rollout" for event in events) == 4 * 8
    played = list(read_lines(tmp_path / "trajectories.jsonl"))
    assert [line["step"] for line in played] == [step for step in (1, 2, 3, 4) for _ in range(8)]
    assert all("assistant" in line["prompt"] for line in played)


async def test_several_epochs_of_minibatches_move_the_ratio(tmp_path: Path) -> None:
    config = replace(CONFIG, max_steps=1, num_epochs=3, minibatch=4, learning_rate=3e-3, epsilon=0.05)
    await make_trainer(tmp_path, config).train()
    (line,) = read_metrics(tmp_path)
    assert line["train/ratio_mean"] != pytest.approx(1.0, abs=1e-4)
    assert line["train/kl"] > 0
    assert line["train/clip_ratio"] > 0


async def test_the_rewarded_token_becomes_likelier(tmp_path: Path) -> None:
    """The sign of the whole chain: reward answers that begin with a low byte, and see them win."""

    policy = make_policy()

    def low(trajectory: Trajectory) -> bool:
        return trajectory.token_ids[0] < 60

    class Judge(FakeVerifier):
        async def verify(self, task: Any, solution: str | None) -> Verdict:
            return Verdict(True, int(solution == "low"), 1)

    trainer = make_trainer(
        tmp_path,
        replace(CONFIG, batch_size=1, num_generations=24, max_steps=8, max_tokens=1, learning_rate=2e-2),
        policy,
        verifier=Judge(),
    )
    engine = trainer._engine
    verify = engine._verify

    async def judged(task: Any, trajectory: Trajectory) -> None:
        trajectory.submission = "low" if low(trajectory) else "high"
        await verify(task, trajectory)

    engine._verify = judged  # type: ignore[method-assign]
    await trainer.train()
    rates = [line["train/code_acc"] for line in read_metrics(tmp_path)]
    assert rates[0] < 0.5
    assert rates[-1] > rates[0] + 0.3


async def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(event: TrainEvent) -> None:
        if event.kind == "step" and event.step == 3:
            raise Interrupt

    whole = make_trainer(tmp_path / "whole")
    await whole.train()
    first = make_trainer(tmp_path / "parts", on_event=interrupt)
    with pytest.raises(Interrupt):
        await first.train()
    # As after a kill: step 3 was logged, but the newest checkpoint is of step 2.
    shutil.rmtree(list_checkpoints(tmp_path / "parts" / "checkpoints")[-1])
    verifier = LengthVerifier()
    verifier.calls = 2 * 8
    second = make_trainer(tmp_path / "parts", policy=make_policy(seed=99), verifier=verifier)
    second.resume(tmp_path / "parts" / "checkpoints")
    assert second.step == 2
    await second.train()
    assert float((weights(second.policy) - weights(whole.policy)).abs().max()) < 1e-6
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        lines = [list(read_lines(tmp_path / run / name)) for run in ("whole", "parts")]
        assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    played = [[(t["task_id"], t["token_ids"]) for t in read_lines(tmp_path / run / name)] for run in ("whole", "parts")]
    assert played[0] == played[1]


async def test_a_resumed_run_learns_at_the_rate_that_is_asked_for_now(tmp_path: Path) -> None:
    await make_trainer(tmp_path, replace(CONFIG, max_steps=1)).train()
    again = make_trainer(tmp_path, replace(CONFIG, learning_rate=5e-5, weight_decay=0.01))
    again.resume(tmp_path / "checkpoints")
    (group,) = again._updater.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (5e-5, 0.01)
    assert again._updater.optimizer.state


async def test_resume_ignores_what_a_killed_process_left(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, replace(CONFIG, save_steps=1, max_steps=2))
    await trainer.train()
    checkpoints = tmp_path / "checkpoints"
    killed_before_the_rename = checkpoints / ".saving-abc"
    shutil.copytree(checkpoints / "step-000002", killed_before_the_rename)
    killed_while_removing = checkpoints / "step-000009"
    shutil.copytree(checkpoints / "step-000002", killed_while_removing)
    (killed_while_removing / "progress.json").unlink()
    again = make_trainer(tmp_path, policy=make_policy(seed=5))
    again.resume(checkpoints)
    assert again.step == 2
    assert torch.equal(weights(again.policy), weights(trainer.policy))
    again.save()
    assert not killed_before_the_rename.exists()


async def test_resume_refuses_what_does_not_fit(tmp_path: Path) -> None:
    await make_trainer(tmp_path, replace(CONFIG, max_steps=1)).train()
    saved = tmp_path / "checkpoints"
    with pytest.raises(ConfigError, match="seed 0, not 7"):
        make_trainer(tmp_path, replace(CONFIG, seed=7)).resume(saved)
    other = make_trainer(tmp_path)
    other.tasks = make_tasks(3)
    with pytest.raises(ConfigError, match="other tasks"):
        other.resume(saved)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        make_trainer(tmp_path).resume(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds a run already"):
        await make_trainer(tmp_path).train()


async def test_checkpoints_are_whole_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    await make_trainer(tmp_path, replace(CONFIG, save_steps=1, keep_checkpoints=2)).train()
    found = list_checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in found] == ["step-000003", "step-000004"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {path.name for path in found}
    assert (found[-1] / "policy" / "config.json").is_file()


async def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert list((tmp_path / "checkpoints").iterdir()) == []


async def test_a_batch_without_a_contrast_is_skipped_with_the_reason_and_stops_in_the_end(tmp_path: Path) -> None:
    events: list[TrainEvent] = []
    config = replace(CONFIG, max_steps=9, max_skipped=3)
    trainer = make_trainer(tmp_path, config, verifier=LengthVerifier([1]), on_event=events.append)
    before = weights(trainer.policy)
    with pytest.raises(TrainingStopped, match=r"3 steps in a row.*all 2 groups are without a contrast"):
        await trainer.train()
    assert torch.equal(weights(trainer.policy), before)
    lines = read_metrics(tmp_path)
    assert len(lines) == 3
    raw = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(set(NAMES) <= set(line) for line in raw)
    assert raw[0]["train/grad_norm"] is None  # named, and without a value: nothing was learned
    assert all("without a contrast" in line["skipped"] and line["train/groups_degenerate"] == 2 for line in lines)
    assert sum(event.kind == "skip" for event in events) == 3


async def test_a_run_that_has_solved_everything_is_not_stopped(tmp_path: Path) -> None:
    policy = ScriptedPolicy([render_call("submit_solution", {"code": "xx"})])
    policy.parameters = lambda: [torch.nn.Parameter(torch.zeros(1))]  # type: ignore[method-assign]
    config = replace(CONFIG, max_steps=4, max_skipped=2, max_tokens=100)
    await make_trainer(tmp_path, config, policy, verifier=FakeVerifier()).train()
    assert [line["train/code_acc"] for line in read_metrics(tmp_path)] == [1.0] * 4


async def test_a_lost_batch_is_skipped_by_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    made = 0

    def env() -> FakeEnv:
        nonlocal made
        made += 1
        lost = made <= 2 * 8
        return FakeEnv(fail=lambda step: SandboxDied("s", DeathReason.HOST) if lost else None)

    await make_trainer(tmp_path, env=env).train()
    first, *rest = read_metrics(tmp_path)
    assert first["skipped"] == "all 8 rollouts are masked (sandbox:host 8)"
    assert (first["train/masked"], first["train/masked/sandbox:host"]) == (8.0, 8.0)
    assert "train/avg_reward" not in first
    assert all("skipped" not in line and line["train/masked"] == 0 for line in rest)


def dead(step: int) -> Exception | None:
    return SandboxDied("s", DeathReason.OOM)


async def test_an_infrastructure_that_keeps_failing_stops_the_run(tmp_path: Path) -> None:
    made = 0

    def mostly_dead() -> FakeEnv:
        nonlocal made
        made += 1
        return FakeEnv() if made % 5 == 0 else FakeEnv(fail=dead)

    config = replace(CONFIG, max_steps=9, rollout_attempts=1)
    with pytest.raises(TrainingStopped, match=r"rollouts of the last 3 steps.*sandbox:oom.*more than 50%"):
        await make_trainer(tmp_path / "a", config, env=mostly_dead).train()
    with pytest.raises(TrainingStopped, match=r"every rollout was lost.*sandbox:oom 8"):
        await make_trainer(tmp_path / "b", replace(config, max_steps=1), env=lambda: FakeEnv(fail=dead)).train()


async def test_an_evaluation_of_what_is_left_of_a_lost_batch_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, env=lambda: FakeEnv(fail=dead))
    with pytest.raises(TrainingStopped, match=r"'before': 12 of 12 rollouts .*sandbox:oom 12; the last said: sandbox"):
        await trainer.evaluate(make_tasks(4), samples=3, label="before")
    assert len(list(read_lines(tmp_path / "before.jsonl"))) == 12


async def test_a_wrong_key_ends_the_run_at_once(tmp_path: Path) -> None:
    made = 0

    def env() -> FakeEnv:
        nonlocal made
        made += 1
        return FakeEnv(fail=lambda step: Unauthorized("http://h refused the key"))

    with pytest.raises(Unauthorized):
        await make_trainer(tmp_path, env=env).train()
    assert made <= 8
    assert read_metrics(tmp_path) == []


async def test_a_masked_rollout_does_not_train(tmp_path: Path) -> None:
    made = 0

    def env() -> FakeEnv:
        nonlocal made
        made += 1
        return FakeEnv(fail=dead) if made in (1, 2, 9, 10) else FakeEnv()

    config = replace(CONFIG, max_steps=1, rollout_attempts=1)
    trainer = make_trainer(tmp_path, config, env=env)
    seen: list[Sample] = []
    update = trainer._updater.update

    def spy(samples: Sequence[Sample], step: int) -> dict[str, float]:
        seen.extend(samples)
        return update(samples, step)

    trainer._updater.update = spy  # type: ignore[method-assign]
    await trainer.train()
    assert len(seen) == 8 - 2
    assert all(sample.trajectory.reward is not None for sample in seen)


async def test_a_batch_that_exceeds_capacity_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", capacity=lambda: 7)
    with pytest.raises(CapacityError, match=r"2 x 4 needs 8 sandboxes, there is room for 7; lower --batch-size"):
        await trainer.train()
    assert not (tmp_path / "run").exists()
    make_trainer(tmp_path, replace(CONFIG, env_concurrency=7), capacity=lambda: 7).check_capacity()


async def test_cancelling_while_learning_leaves_a_whole_step(tmp_path: Path) -> None:
    learned = asyncio.Event()

    def notice(event: TrainEvent) -> None:
        if event.kind == "step" and event.step == 2:
            asyncio.get_running_loop().call_later(0.05, learned.set)

    trainer = make_trainer(tmp_path, replace(CONFIG, max_steps=50, save_steps=0), on_event=notice)
    job = asyncio.create_task(trainer.train())
    await learned.wait()
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    again = make_trainer(tmp_path, replace(CONFIG, max_steps=50), policy=make_policy(seed=5))
    again.resume(tmp_path / "checkpoints")
    assert again.step == trainer.step
    assert again._taken == 2 * again.step
    assert torch.equal(weights(again.policy), weights(trainer.policy))


async def test_the_event_loop_runs_while_the_gradient_is_computed(tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    trainer = make_trainer(tmp_path, replace(CONFIG, max_steps=1, num_epochs=8))
    ticker = asyncio.create_task(tick())
    during: list[int] = []
    learn = trainer._learn

    async def watched(*arguments: Any) -> Any:
        start = ticks
        result = await learn(*arguments)
        during.append(ticks - start)
        return result

    trainer._learn = watched  # type: ignore[method-assign,assignment]
    await trainer.train()
    ticker.cancel()
    assert during[0] > 3


async def test_kl_holds_the_policy_near_the_reference(tmp_path: Path) -> None:
    moved: list[float] = []
    for beta in (0.0, 5.0):
        config = replace(CONFIG, max_steps=4, beta=beta, num_epochs=2, learning_rate=3e-3)
        trainer = make_trainer(tmp_path / str(beta), config)
        before = weights(trainer.policy)
        await trainer.train()
        moved.append(float((weights(trainer.policy) - before).norm()))
        assert read_metrics(tmp_path / str(beta))[-1]["train/kl"] > 0
    assert moved[1] < moved[0]
    with pytest.raises(ConfigError, match="--beta 0"):
        make_trainer(tmp_path, replace(CONFIG, beta=0.1), ScriptedPolicy(["x"]))


async def test_evaluation_counts_by_family_and_leaves_masked_out(tmp_path: Path) -> None:
    def script(conversation: str, seed: int) -> str:
        return render_call("submit_solution", {"code": "xx" if "Do 1." in conversation else "x"})

    policy = ScriptedPolicy(script)
    policy.parameters = lambda: [torch.nn.Parameter(torch.zeros(1))]  # type: ignore[method-assign]
    made = 0

    def env() -> FakeEnv:
        nonlocal made
        made += 1
        return FakeEnv(fail=dead) if made == 1 else FakeEnv()

    config = replace(CONFIG, max_tokens=100, rollout_attempts=1)
    trainer = make_trainer(tmp_path, config, policy, env=env, verifier=FakeVerifier())
    result = await trainer.evaluate(make_tasks(4), samples=3, label="before")
    assert (result.pass_at_1, result.total.scored, result.masked) == (3 / 11, 11, {"sandbox:oom": 1})
    assert (result.families["f0"].pass_at_1, result.families["f1"].pass_at_1) == (0.0, 0.5)
    assert (result.families["f0"].scored, result.families["f0"].tasks) == (5, 2)
    assert len(list(read_lines(tmp_path / "before.jsonl"))) == 12
    greedy = await trainer.evaluate(make_tasks(4), samples=3, temperature=0)
    assert (greedy.samples, greedy.total.scored) == (1, 4)
    json.dumps(result.to_json())


def test_the_order_of_tasks_is_a_function_of_the_seed() -> None:
    first = list(islice(task_order(5, seed=1), 15))
    assert first == list(islice(task_order(5, seed=1), 15))
    assert first != list(islice(task_order(5, seed=2), 15))
    assert all(sorted(first[i : i + 5]) == list(range(5)) for i in (0, 5, 10))
    assert first[0:5] != first[5:10]
    assert list(islice(task_order(5, seed=1, start=7), 8)) == first[7:]
    assert derive_seed(1, "a") != derive_seed(1, "b")


def test_minibatches_do_not_change_the_gradient_of_a_batch() -> None:
    samples = [Sample(record(length, index), (-1.0) ** index * 0.5) for index, length in enumerate((3, 9, 5, 7))]
    gradients = []
    for micro_tokens in (1, 30, 10000):
        policy = make_policy()
        updater = Updater(policy, replace(CONFIG, micro_tokens=micro_tokens))
        updater._accumulate(samples)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert torch.allclose(gradients[0], gradients[2], atol=1e-6)
    assert torch.allclose(gradients[1], gradients[2], atol=1e-6)
    assert [len(part) for part in micro_batches(samples, 30)] == [2, 2]


def record(length: int, start: int = 0) -> Trajectory:
    trajectory = Trajectory("t", prompt_ids=[1, 2, 3, start], reward=1.0, end_reason=EndReason.DONE, turns=1)
    trajectory.append_sampled([start + i for i in range(length)], [-3.0] * length)
    return trajectory


def test_collate_pads_completions() -> None:
    a, b = record(2), record(3)
    b.append_observed([9])
    batch = collate([Sample(a, 1.0), Sample(b, -1.0)])
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch.old_logps.tolist() == [[-3, -3, 0, 0], [-3, -3, -3, 0]]
    assert batch.completions == [[0, 1], [0, 1, 2, 9]]
    b.mask.pop()
    with pytest.raises(BadRequest, match="not aligned"):
        collate([Sample(b, 1.0)])


def test_rollouts_of_one_prompt_stay_in_one_micro_batch() -> None:
    samples = [Sample(record(4, start), 1.0) for start in (0, 1, 0, 1, 0, 1)]
    parts = list(micro_batches(samples, 4 + 3 * 4))
    assert [{sample.trajectory.prompt_ids[-1] for sample in part} for part in parts] == [{0}, {1}]


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change() -> None:
    policy = make_policy()
    before = weights(policy)
    broken = Sample(record(3), float("inf"))
    with pytest.raises(SandyardError, match="gradient's norm is"):
        Updater(policy, CONFIG).update([broken], 1)
    assert torch.equal(weights(policy), before)


def test_rollout_metrics_of_a_batch_computed_by_hand() -> None:
    def call(status: StepStatus, seconds: float) -> Call:
        return Call("run_python", status, seconds)

    def of(passed: int, submission: str | None, calls: list[Call], sampled: int, **more: Any) -> Trajectory:
        verdict = Verdict(submission is not None, passed, 4)
        mask = [1] * sampled + [0] * 5
        return Trajectory(
            "t", mask=mask, calls=calls, submission=submission, verdict=verdict, reward=shape_reward(verdict), **more
        )

    ok, bad = call(StepStatus.OK, 0.2), call(StepStatus.INVALID_CALL, 0.0)
    trajectories = [
        of(4, "a", [ok, call(StepStatus.TASK_FAILED, 0.4)], 10, turns=2, timings=Timings(0.1, 1.0, 0.6)),
        of(1, "b", [bad], 20, turns=1, truncated=True, timings=Timings(0.3, 2.0, 0.0)),
        of(0, None, [bad, bad, ok], 30, turns=3, timings=Timings(0.5, 3.0, 0.2)),
        Trajectory("t", masked="sandbox:oom", failures=["sandbox:link"], timings=Timings(0.7, 4.0, 0.0)),
    ]
    metrics = rollout_metrics(trajectories, 1)
    expected = {
        "train/code_acc": 1 / 3,
        "train/test_pass_rate": (1 + 0.25 + 0) / 3,
        "train/avg_reward": (1.0 + (0.1 + 0.4 / 4) + 0.0) / 3,
        "train/submit_rate": 2 / 3,
        "train/num_turns": 2.0,
        "train/tool_error_rate": 3 / 6,
        "train/completion_length": 20.0,
        "train/truncated": 1 / 3,
        "train/masked": 1.0,
        "train/masked/sandbox:oom": 1.0,
        "train/groups_degenerate": 1.0,
        "env/failures": 2.0,
        "env/failures/sandbox:oom": 1.0,
        "env/failures/sandbox:link": 1.0,
        "env/create_p50": 0.4,
        "env/exec_p50": 0.2,
        "time/generate": 2.5,
        "time/env_wait": (0.7 + 0.3 + 0.7 + 0.7) / 4,
    }
    assert metrics == pytest.approx(expected)


def test_policy_health_of_a_batch_computed_by_hand() -> None:
    ratio = torch.tensor([[0.5, 1.1, 1.5], [0.5, 1.5, 9.0]])
    old = torch.full((2, 3), -2.0)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])  # the 9.0 was observed: it counts nowhere
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]])
    config = LossConfig(epsilon=0.2, epsilon_high=0.6)
    advantages = torch.tensor([1.0, -1.0])
    health = policy_health(old + ratio.log(), old, advantages, mask, entropy, config)
    k3 = [1 / r - math.log(1 / r) - 1 for r in (0.5, 1.1, 1.5, 0.5, 1.5)]
    assert health == pytest.approx(
        {
            # Only 0.5 with a negative advantage: 1.5 is within 1 + epsilon_high, 0.5 with a positive one is not cut.
            "train/clip_ratio": 1 / 5,
            "train/kl": sum(k3) / 5,
            "train/entropy": 3.0,
            "train/ratio_mean": (0.5 + 1.1 + 1.5 + 0.5 + 1.5) / 5,
        },
        rel=1e-5,
    )
    assert weighted_mean([(3.0, {"a": 1.0}), (1.0, {"a": 5.0})]) == {"a": 2.0}


def test_metrics_without_a_scored_rollout_leave_means_out() -> None:
    masked = Trajectory("t", masked="verifier")
    metrics = rollout_metrics([masked, masked], 1)
    assert metrics["train/masked/verifier"] == 2
    assert not any("reward" in name for name in metrics)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_generations": 1}, "num_generations is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"scale": "std"}, "'std' is unknown"),
        ({"loss_type": "ppo"}, "'ppo' is unknown"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
        ({"beta": -0.1}, "beta is -0.1"),
        ({"beta": math.nan}, "beta is nan"),
        ({"epsilon_high": math.nan}, "epsilon_high"),
        ({"max_turns": 0}, "max_turns is 0"),
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(CONFIG, **change)


def test_flags_win_over_the_environment() -> None:
    environ = {"MAX_TURNS": "7", "ENV_CONCURRENCY": "3"}
    config = CONFIG.override({"max_turns": 2, "batch_size": None}, environ)
    assert (config.max_turns, config.env_concurrency, config.batch_size) == (2, 3, 2)
    with pytest.raises(ConfigError, match="MAX_TURNS='x'"):
        CONFIG.override(environ={"MAX_TURNS": "x"})
    with pytest.raises(ConfigError, match="'batchsize' is unknown"):
        CONFIG.override({"batchsize": 3}, {})
