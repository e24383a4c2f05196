from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sandyard.envs.base import StepResult, StepStatus
from sandyard.errors import (
    AgentLinkError,
    BadRequest,
    CapacityError,
    ConfigError,
    CreateFailed,
    DeathReason,
    NotFound,
    SandboxDied,
    SandyardError,
    TaskError,
    Unauthorized,
    VerifierError,
)
from sandyard.train.deadlines import Deadlines
from sandyard.train.episode import MAX_CALLS, system_and_user
from sandyard.train.metrics import rollout_metrics
from sandyard.train.policies.chat import render_call
from sandyard.train.rollout import RolloutConfig, RolloutEngine
from sandyard.train.testing import END, ScriptedPolicy
from sandyard.train.trajectory import EndReason, Trajectory, read_trajectories, write_trajectories
from tests.train.tiny import FakeEnv, FakeVerifier, make_policy, make_tasks

RUN = render_call("run_python", {"code": "1"})
SUBMIT = render_call("submit_solution", {"code": "xx"})
CONFIG = RolloutConfig(max_turns=4, max_tokens=200)
Fail = Callable[[int], Exception | None]


@pytest.fixture(autouse=True)
def every_env_is_closed() -> Iterator[None]:
    FakeEnv.live = FakeEnv.most = 0
    yield
    assert FakeEnv.live == 0


def make_engine(
    policy: ScriptedPolicy,
    env: Callable[[], FakeEnv] = FakeEnv,
    verifier: FakeVerifier | None = None,
    config: RolloutConfig = CONFIG,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> RolloutEngine:
    build = system_and_user("System.")
    return RolloutEngine(policy, env, verifier or FakeVerifier(), build, config, on_trajectory=on_trajectory)


async def play(*turns: str, max_length: int = 4096, config: RolloutConfig = CONFIG) -> Trajectory:
    (trajectory,) = await make_engine(ScriptedPolicy(turns, max_length=max_length), config=config).run(make_tasks(1))
    return trajectory


class Faulty:
    """Makes envs of which the nth fails as the nth function says; later ones work."""

    def __init__(self, *faults: Fail) -> None:
        self.made = 0
        self._faults = faults

    def __call__(self) -> FakeEnv:
        fault = self._faults[self.made] if self.made < len(self._faults) else (lambda step: None)
        self.made += 1
        return FakeEnv(fail=fault)


def at(step: int, error: Exception) -> Fail:
    return lambda now: error if now == step else None


async def test_a_rollout_with_tools_ends_when_it_submits() -> None:
    trajectory = await play(RUN, SUBMIT, RUN)
    assert (trajectory.end_reason, trajectory.turns, trajectory.reward) == (EndReason.DONE, 2, 1.0)
    assert [call.tool for call in trajectory.calls] == ["run_python", "submit_solution"]
    assert (trajectory.submission, trajectory.truncated, trajectory.masked) == ("xx", False, None)


async def test_tokens_are_those_that_were_sampled_and_observed() -> None:
    policy = ScriptedPolicy([RUN, SUBMIT])
    (trajectory,) = await make_engine(policy).run(make_tasks(1))
    first = [*RUN.encode(), END]
    glue = [*policy.close_turn(first), *policy.render_observation(["run_python"], ["ok"])]
    second = [*SUBMIT.encode(), END]
    assert trajectory.token_ids == first + glue + second
    assert trajectory.mask == [1] * len(first) + [0] * len(glue) + [1] * len(second)
    assert [p != 0 for p in trajectory.logprobs] == [m == 1 for m in trajectory.mask]
    assert policy.decode(trajectory.prompt_ids).endswith("system: System.\nuser: Do 0.\nassistant: ")


async def test_the_other_ends() -> None:
    assert (await play("I am done.")).end_reason is EndReason.STOP_CALLING
    assert (await play(RUN)).end_reason is EndReason.MAX_TURNS
    assert (await play(RUN)).turns == 4
    long = await play("a" * 500, config=replace(CONFIG, max_turns=1))
    assert (long.end_reason, long.truncated) == (EndReason.LENGTH, True)
    no_room = await play(RUN, max_length=500)
    assert (no_room.end_reason, no_room.truncated) == (EndReason.LENGTH, True)
    assert len(no_room.prompt_ids) + len(no_room.token_ids) <= 500


async def test_never_submitted_is_scored_zero_not_masked() -> None:
    trajectory = await play("I am done.")
    assert (trajectory.reward, trajectory.masked) == (0.0, None)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("<tool_call>{]</tool_call>", "not valid JSON"),
        ("a" * 500, "cut off"),
        (render_call("nope", {}), "no tool nope"),
    ],
)
async def test_a_mistake_of_the_policy_is_told_and_played_on(turn: str, said: str) -> None:
    policy = ScriptedPolicy([turn, SUBMIT])
    (trajectory,) = await make_engine(policy).run(make_tasks(1))
    assert said in policy.decode(trajectory.token_ids)
    assert (trajectory.reward, trajectory.tool_errors) == (1.0, 1)
    assert trajectory.calls[0].status is StepStatus.INVALID_CALL


async def test_calls_of_a_turn_are_done_in_order_until_the_episode_is_over() -> None:
    trajectory = await play(RUN + SUBMIT + RUN, config=replace(CONFIG, max_tokens=1000))
    assert [call.tool for call in trajectory.calls] == ["run_python", "submit_solution"]


async def test_a_long_observation_is_cut_and_says_so() -> None:
    policy = ScriptedPolicy([render_call("é" * 1000, {}), SUBMIT], max_length=20000)
    config = replace(CONFIG, observation_limit=100, max_tokens=10000)
    (trajectory,) = await make_engine(policy, config=config).run(make_tasks(1))
    observed = [t for t, m in zip(trajectory.token_ids, trajectory.mask, strict=True) if not m]
    text = policy.decode(observed)
    assert "characters, the middle is cut" in text
    assert "\ufffd" not in text


async def test_groups_are_contiguous_and_seeds_differ() -> None:
    trajectories = await make_engine(ScriptedPolicy([SUBMIT])).run(make_tasks(3), 4, seed=1)
    assert [t.task_id for t in trajectories] == [f"t{i}" for i in range(3) for _ in range(4)]
    assert [(t.group, t.sample) for t in trajectories] == [(i, j) for i in range(3) for j in range(4)]
    assert len({t.seed for t in trajectories}) == 12
    again = await make_engine(ScriptedPolicy([SUBMIT])).run(make_tasks(3), 4, seed=1)
    assert [t.seed for t in again] == [t.seed for t in trajectories]


async def test_env_calls_overlap() -> None:
    policy = ScriptedPolicy([RUN, RUN, SUBMIT])
    engine = make_engine(policy, lambda: FakeEnv(delay=0.05))
    await engine.run(make_tasks(1))
    started = time.perf_counter()
    trajectories = await engine.run(make_tasks(32))
    spent = time.perf_counter() - started
    assert all(t.turns == 3 and t.reward == 1.0 for t in trajectories)
    assert FakeEnv.most == 32
    assert spent < 1.0  # three delays of 0.05 s and a margin for a busy machine; one after another: 4.8 s


async def test_a_ready_trajectory_does_not_wait_for_a_slow_one() -> None:
    delays = iter([1.0] + [0.01] * 8)
    done: list[float] = []
    started = time.perf_counter()
    engine = make_engine(
        ScriptedPolicy([RUN, SUBMIT]),
        lambda: FakeEnv(delay=next(delays)),
        on_trajectory=lambda t: done.append(time.perf_counter() - started),
    )
    await engine.run(make_tasks(9))
    assert done[8] > 2.0
    assert done[7] < done[8] - 1.0


async def test_verification_overlaps_too() -> None:
    engine = make_engine(ScriptedPolicy([SUBMIT]), verifier=FakeVerifier(delay=0.1))
    started = time.perf_counter()
    await engine.run(make_tasks(16))
    assert time.perf_counter() - started < 1.2  # one after another: 1.6 s


async def test_env_concurrency_bounds_live_sandboxes() -> None:
    config = replace(CONFIG, env_concurrency=3)
    engine = make_engine(ScriptedPolicy([RUN, SUBMIT]), lambda: FakeEnv(delay=0.005), config=config)
    await engine.run(make_tasks(12))
    assert FakeEnv.most == 3


INFRA: list[tuple[SandyardError, str]] = [
    (SandboxDied("s", DeathReason.OOM), "sandbox:oom"),
    (CreateFailed("disk", "full"), "sandbox:create"),
    (AgentLinkError("gone"), "sandbox:link"),
]


@pytest.mark.parametrize(("error", "reason"), INFRA)
@pytest.mark.parametrize("step", [0, 1])
async def test_before_anything_was_observed_it_is_tried_again(error: SandyardError, reason: str, step: int) -> None:
    envs = Faulty(at(step, error))
    (trajectory,) = await make_engine(ScriptedPolicy([RUN, SUBMIT]), envs).run(make_tasks(1))
    assert (trajectory.reward, trajectory.attempts, envs.made) == (1.0, 2, 2)
    assert len(trajectory.calls) == 2
    assert sum(trajectory.mask) == len(RUN) + len(SUBMIT) + 2


@pytest.mark.parametrize(("error", "reason"), INFRA)
async def test_after_an_observation_it_is_masked(error: SandyardError, reason: str) -> None:
    envs = Faulty(at(2, error))
    broken, fine = await make_engine(ScriptedPolicy([RUN, SUBMIT]), envs).run(make_tasks(2))
    assert (broken.masked, broken.reward, broken.verdict) == (reason, None, None)
    assert str(error) in (broken.detail or "")
    assert fine.reward == 1.0
    assert envs.made == 2


async def test_an_env_that_answers_infra_error_is_masked_not_scored() -> None:
    class Ill(FakeEnv):
        async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
            return StepResult("proxy lost", status=StepStatus.INFRA_ERROR)

    (trajectory,) = await make_engine(ScriptedPolicy([RUN]), Ill).run(make_tasks(1))
    assert (trajectory.masked, trajectory.reward, trajectory.attempts) == ("sandbox:env", None, 2)
    assert "proxy lost" in (trajectory.detail or "")


async def test_tries_are_bounded() -> None:
    died = SandboxDied("s", DeathReason.HOST)
    envs = Faulty(at(0, died), at(1, died), at(0, died))
    (trajectory,) = await make_engine(ScriptedPolicy([RUN, SUBMIT]), envs).run(make_tasks(1))
    assert (trajectory.masked, envs.made) == ("sandbox:host", 2)


async def test_no_room_is_waited_for_and_then_masked() -> None:
    full = CapacityError("full", retry_after=0.01)
    envs = Faulty(*[at(0, full)] * 5)
    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), envs).run(make_tasks(1))
    assert (trajectory.reward, envs.made) == (1.0, 6)
    config = replace(CONFIG, capacity_attempts=3)
    envs = Faulty(*[at(0, full)] * 5)
    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), envs, config=config).run(make_tasks(1))
    assert (trajectory.masked, envs.made) == ("capacity", 3)


@pytest.mark.parametrize("error", [KeyError("oops"), TypeError("bug"), Unauthorized("wrong key"), NotFound("base")])
async def test_what_is_no_rollouts_fault_ends_the_batch_at_once(error: Exception) -> None:
    """A wrong key or a bug meets every rollout alike: masking them all would hide it."""
    envs = Faulty(at(1, error))
    started = time.perf_counter()
    with pytest.raises(type(error)) as caught:
        await make_engine(ScriptedPolicy([RUN, SUBMIT]), lambda: slow(envs())).run(make_tasks(2))
    assert caught.value is error
    assert error.__notes__ == ["in a rollout of task t0"]
    assert time.perf_counter() - started < 5  # the other rollout, which takes 9 s, was not waited for
    assert FakeEnv.live == 0


def slow(env: FakeEnv) -> FakeEnv:
    if env._fail(1) is None:
        env._delay = 9
    return env


async def test_a_bug_of_the_verifier_or_the_reward_ends_the_batch() -> None:
    buggy = FakeVerifier(lambda attempt: AttributeError("bug"))
    with pytest.raises(AttributeError):
        await make_engine(ScriptedPolicy([SUBMIT]), verifier=buggy).run(make_tasks(1))
    assert buggy.calls == 1
    for nothing in (None, float("nan"), float("inf"), "1.0"):
        engine = make_engine(ScriptedPolicy([SUBMIT]))
        engine._reward = lambda verdict, nothing=nothing: nothing  # type: ignore[misc]
        with pytest.raises(BadRequest, match="not a finite number"):
            await engine.run(make_tasks(1))


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError("slow")])
async def test_a_bare_connection_error_of_an_env_is_the_infrastructures(error: Exception) -> None:
    envs = Faulty(at(0, error), at(2, error))
    (trajectory,) = await make_engine(ScriptedPolicy([RUN, SUBMIT]), envs).run(make_tasks(1))
    reason = f"error:{type(error).__name__}"
    assert (trajectory.masked, trajectory.failures, trajectory.reward) == (reason, [reason], None)
    metrics = rollout_metrics([trajectory], 1)
    assert (metrics["env/failures"], metrics[f"env/failures/{reason}"]) == (2.0, 2.0)
    assert (metrics["train/masked"], metrics[f"train/masked/{reason}"]) == (1.0, 1.0)


async def test_a_prompt_that_the_model_cannot_hold_is_the_tasks_fault() -> None:
    trajectory = await play(SUBMIT, max_length=100)
    assert (trajectory.masked, trajectory.reward, trajectory.attempts) == ("task", None, 1)
    assert "the policy holds 100" in (trajectory.detail or "")


async def test_a_turn_of_too_many_calls_is_told_and_not_done() -> None:
    config = replace(CONFIG, max_tokens=2000)
    within = await play("".join([RUN] * MAX_CALLS), SUBMIT, config=config)
    assert (len(within.calls), within.tool_errors, within.reward) == (MAX_CALLS + 1, 0, 1.0)
    beyond = await play("".join([RUN] * (MAX_CALLS + 1)), SUBMIT, config=config)
    assert ([call.tool for call in beyond.calls], beyond.tool_errors) == (["", "submit_solution"], 1)
    assert beyond.reward == 1.0


async def test_half_a_surrogate_pair_is_written_and_read(tmp_path: Path) -> None:
    half = render_call("submit_solution", {"code": "xx \ud83d"})
    trajectory = await play(half)
    assert trajectory.submission == "xx \ud83d"
    write_trajectories(tmp_path / "t.jsonl", [trajectory])
    assert read_trajectories(tmp_path / "t.jsonl") == [trajectory]


async def test_the_verifiers_failure_is_tried_once_more_and_never_scored() -> None:
    once = FakeVerifier(lambda attempt: VerifierError("lost") if attempt == 0 else None)
    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), verifier=once).run(make_tasks(1))
    assert (trajectory.reward, once.calls) == (1.0, 2)
    always = FakeVerifier(lambda attempt: VerifierError("lost"))
    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), verifier=always).run(make_tasks(1))
    assert (trajectory.reward, trajectory.masked, always.calls) == (None, "verifier", 2)
    broken = FakeVerifier(lambda attempt: TaskError("no tests"))
    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), verifier=broken).run(make_tasks(1))
    assert (trajectory.masked, broken.calls) == ("task", 1)


async def test_deadlines_mask() -> None:
    quick = Deadlines(exec=0.01, step=0.05, rollout=0.2, batch=0.5, verify=0.1)
    config = replace(CONFIG, deadlines=quick, attempts=1)
    step = make_engine(ScriptedPolicy([RUN]), lambda: FakeEnv(delay=9), config=config)
    assert [t.masked for t in await step.run(make_tasks(1))] == ["deadline:step"]
    rollout = make_engine(ScriptedPolicy([RUN], delay=9), config=config)
    assert [t.masked for t in await rollout.run(make_tasks(1))] == ["deadline:rollout"]
    verify = make_engine(ScriptedPolicy([SUBMIT]), verifier=FakeVerifier(delay=9), config=config)
    assert [t.masked for t in await verify.run(make_tasks(1))] == ["deadline:verify"]
    config = replace(config, env_concurrency=1)
    batch = make_engine(ScriptedPolicy([RUN], delay=0.19), config=config)
    assert [t.masked for t in await batch.run(make_tasks(9))][-1] == "deadline:batch"


@pytest.mark.parametrize(
    ("inner", "outer"), [("exec", "step"), ("step", "rollout"), ("rollout", "batch"), ("verify", "batch")]
)
def test_deadlines_out_of_order_are_refused_by_name(inner: str, outer: str) -> None:
    with pytest.raises(ConfigError, match=rf"deadline {inner} .*deadline {outer} "):
        replace(Deadlines(), **{inner: getattr(Deadlines(), outer)})


async def test_cancelling_the_batch_closes_every_env() -> None:
    job = asyncio.create_task(make_engine(ScriptedPolicy([RUN]), lambda: FakeEnv(delay=9)).run(make_tasks(8)))
    await asyncio.sleep(0.05)
    assert FakeEnv.live == 8
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert FakeEnv.live == 0


async def test_a_close_that_fails_does_not_lose_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(FakeEnv):
        async def close(self) -> None:
            await super().close()
            raise AgentLinkError("no answer to kill")

    (trajectory,) = await make_engine(ScriptedPolicy([SUBMIT]), Sticky).run(make_tasks(1))
    assert trajectory.reward == 1.0
    assert "no answer to kill" in caplog.text


async def test_trajectories_are_read_as_written(tmp_path: Path) -> None:
    policy = ScriptedPolicy([RUN, SUBMIT])
    trajectories = await make_engine(policy, Faulty(at(2, AgentLinkError("gone")))).run(make_tasks(2), 2)
    write_trajectories(tmp_path / "t.jsonl", trajectories[:1], policy.decode, step=1)
    write_trajectories(tmp_path / "t.jsonl", trajectories[1:])
    assert read_trajectories(tmp_path / "t.jsonl") == trajectories
    first = (tmp_path / "t.jsonl").read_text().splitlines()[0]
    assert '"step": 1' in first
    assert "submit_solution" in first


async def test_the_engines_own_time_is_small() -> None:
    engine = make_engine(ScriptedPolicy([RUN, RUN, SUBMIT]))
    tasks = make_tasks(32)
    await engine.run(tasks)
    started = time.process_time()
    await engine.run(tasks)
    # 32 trajectories of 3 turns with a 50 ms env take 0.15 s: 5 % of what each of them waits for.
    assert (time.process_time() - started) / 32 < 0.05 * 0.15


async def test_with_a_real_model_the_record_is_what_training_computes() -> None:
    policy = make_policy()
    build = system_and_user("S.")
    config = replace(CONFIG, max_tokens=8, max_turns=3)
    engine = RolloutEngine(policy, FakeEnv, FakeVerifier(), build, config)
    for trajectory in await engine.run(make_tasks(2), 2):
        assert trajectory.turns >= 1
        ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.token_ids]])
        logps = policy.logprobs(ids, torch.ones_like(ids))[0][0, len(trajectory.prompt_ids) - 1 :].detach()
        mask = torch.tensor(trajectory.mask) == 1
        assert float((logps - torch.tensor(trajectory.logprobs))[mask].abs().max()) < 1e-4
