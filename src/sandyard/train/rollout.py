"""The rollout engine: every trajectory is one coroutine; nobody who is ready waits for somebody who is not.

Env calls of all trajectories overlap each other, generation and verification. A failure of the
infrastructure under one rollout masks that rollout, by reason; it never cancels the batch and is never
scored. The caller's mistake and a fault of the program are no failure of one rollout: they end the batch,
with every env closed, and are raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from sandyard.envs.base import Env
from sandyard.envs.seeds import with_seed
from sandyard.errors import BadRequest, CapacityError, ConfigError, TaskError
from sandyard.tasks.base import Task
from sandyard.train.deadlines import Deadlines
from sandyard.train.episode import BuildMessages, Episode, within
from sandyard.train.failures import DeadlineExceeded, is_infrastructure, mask_reason
from sandyard.train.policies.base import Policy, SamplingParams
from sandyard.train.seeds import derive_seed
from sandyard.train.trajectory import Timings, Trajectory
from sandyard.verify.base import Verdict, Verifier
from sandyard.verify.shaping import shape_reward

logger = logging.getLogger(__name__)
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """`max_tokens` is per turn. `env_concurrency` bounds the trajectories that hold a sandbox (playing or
    being verified) at once, 0: no bound. `observation_limit` is in characters. `attempts`: how often a
    rollout is tried on a fresh env while nothing was observed."""

    max_turns: int = 4
    max_tokens: int = 256
    temperature: float = 1.0
    env_concurrency: int = 0
    observation_limit: int = 4000
    attempts: int = 2
    capacity_attempts: int = 20
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens", "observation_limit", "attempts", "capacity_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.temperature < 0 or self.env_concurrency < 0:
            raise ConfigError("temperature and env_concurrency must not be negative")


class RolloutEngine:
    """Plays tasks with `policy` in envs from `make_env`, scores with `verifier` and `reward`.

    Without a verifier the reward is what the env gave in the episode, 0 where it gave none.
    `on_trajectory` is called with every trajectory as it becomes complete.
    """

    def __init__(
        self,
        policy: Policy,
        make_env: Callable[[], Env],
        verifier: Verifier | None,
        build_messages: BuildMessages,
        config: RolloutConfig,
        *,
        reward: Callable[[Verdict], float] = shape_reward,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self.policy = policy
        self.config = config
        self._make_env = make_env
        self._verifier = verifier
        self._build_messages = build_messages
        self._reward = reward
        self._on_trajectory = on_trajectory

    async def run(
        self, tasks: Sequence[Task], num_generations: int = 1, *, seed: int = 0, temperature: float | None = None
    ) -> list[Trajectory]:
        """Play every task `num_generations` times. The answer is in order, the rollouts of a task
        contiguous, every trajectory either scored or masked with its reason. A task without a seed of its own
        gets one for its env, the same for all of its rollouts. Raises what is neither the policy's doing nor
        the infrastructure's."""
        temperature = self.config.temperature if temperature is None else temperature
        params = SamplingParams(self.config.max_tokens, temperature)
        gate = asyncio.Semaphore(self.config.env_concurrency or max(1, len(tasks) * num_generations))
        jobs: list[tuple[Trajectory, asyncio.Task[None]]] = []
        for group, task in enumerate(tasks):
            seeded = with_seed(task, "env", seed, group)
            for sample in range(num_generations):
                trajectory = Trajectory(task.task_id, task.family, group, sample, derive_seed(seed, group, sample))
                job = asyncio.create_task(self._run_one(seeded, trajectory, params, gate))
                jobs.append((trajectory, job))
        await self._gather(jobs)
        return [trajectory for trajectory, _ in jobs]

    async def _gather(self, jobs: Sequence[tuple[Trajectory, asyncio.Task[None]]]) -> None:
        """Wait for all jobs until the batch deadline; what is not done by then is masked. An error that a
        job raised ends all of them."""
        waiting = [job for _, job in jobs]
        try:
            if waiting:
                deadline = self.config.deadlines.batch
                await asyncio.wait(waiting, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for job in waiting:
                job.cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        for (trajectory, _), result in zip(jobs, results, strict=True):
            if result is not None:
                self._mask(trajectory, "deadline:batch", f"not done after {self.config.deadlines.batch:g} s")
                self._report(trajectory)

    async def _run_one(
        self, task: Task, trajectory: Trajectory, params: SamplingParams, gate: asyncio.Semaphore
    ) -> None:
        async with gate:
            started = time.perf_counter()
            try:
                await self._play(task, trajectory, params)
                await self._verify(task, trajectory)
            except Exception as error:
                if not is_infrastructure(error):
                    error.add_note(f"in a rollout of task {trajectory.task_id}")
                    raise
                self._mask(trajectory, mask_reason(error), str(error) or repr(error))
            trajectory.timings.total = time.perf_counter() - started
        self._report(trajectory)

    async def _play(self, task: Task, trajectory: Trajectory, params: SamplingParams) -> None:
        """Play on a fresh env until it works, or until a failure that must not be repeated."""
        tried, refused = 0, 0
        while True:
            async with _closing(self._make_env()) as env:
                self.config.deadlines.check_tools(env.time_limits())
                episode = Episode(
                    policy=self.policy,
                    env=env,
                    task=task,
                    trajectory=trajectory,
                    build_messages=self._build_messages,
                    params=params,
                    max_turns=self.config.max_turns,
                    observation_limit=self.config.observation_limit,
                    deadlines=self.config.deadlines,
                )
                try:
                    await within(episode.play(), "rollout", self.config.deadlines.rollout)
                    return
                except CapacityError as error:
                    refused += 1
                    if episode.observed or refused >= self.config.capacity_attempts:
                        raise
                    pause = error.retry_after
                    trajectory.failures.append(mask_reason(error))
                except Exception as error:
                    tried += 1
                    if not is_infrastructure(error):
                        raise
                    if episode.observed or tried >= self.config.attempts or not _worth_retry(error):
                        raise
                    pause = 0.0
                    trajectory.failures.append(mask_reason(error))
            _start_again(trajectory)
            await asyncio.sleep(pause)

    async def _verify(self, task: Task, trajectory: Trajectory) -> None:
        """Score, with one more try on a fresh sandbox: the verifier's own failure says nothing."""
        if self._verifier is None:
            trajectory.reward = trajectory.earned or 0.0
            return
        started = time.perf_counter()
        tried, refused = 0, 0
        while True:
            try:
                verdict = await within(
                    self._verifier.verify(task, trajectory.submission), "verify", self.config.deadlines.verify
                )
                break
            except CapacityError as error:
                refused += 1
                if refused >= self.config.capacity_attempts:
                    raise
                trajectory.failures.append(mask_reason(error))
                await asyncio.sleep(error.retry_after)
            except Exception as error:
                tried += 1
                if tried >= 2 or isinstance(error, TaskError) or not is_infrastructure(error):
                    raise
                trajectory.failures.append(mask_reason(error))
        trajectory.timings.verify = time.perf_counter() - started
        trajectory.reward = _finite(self._reward(verdict), task)
        trajectory.verdict = verdict
        trajectory.parts = {"passed": float(verdict.passed), "total": float(verdict.total)}

    def _mask(self, trajectory: Trajectory, reason: str, detail: str) -> None:
        trajectory.masked, trajectory.detail = reason, detail
        trajectory.reward, trajectory.verdict, trajectory.parts = None, None, {}

    def _report(self, trajectory: Trajectory) -> None:
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)


@contextlib.asynccontextmanager
async def _closing(env: Env) -> AsyncIterator[Env]:
    """Close the env whatever happens, also under cancellation; a failure to close is logged: its
    sandbox's lifetime and lease stand behind it."""
    try:
        yield env
    finally:
        close = asyncio.create_task(_close(env))
        try:
            await asyncio.shield(close)
        except asyncio.CancelledError:
            await close
            raise


async def _close(env: Env) -> None:
    try:
        await within(env.close(), "close", _CLOSE_SECONDS)
    except Exception as error:  # noqa: BLE001 - the rollout's own outcome must not be lost over this
        logger.warning("closing an env failed: %s", error)


def _finite(reward: object, task: Task) -> float:
    """A reward that is none would make the whole batch NaN, or count as masked without a reason."""
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise BadRequest(f"task {task.task_id}: the reward function returned {reward!r}, not a finite number")


def _worth_retry(error: Exception) -> bool:
    """A broken task stays broken, and a rollout that used up its time has none for another try."""
    return not (isinstance(error, TaskError) or (isinstance(error, DeadlineExceeded) and error.name == "rollout"))


def _start_again(trajectory: Trajectory) -> None:
    """Forget a try in which nothing was observed."""
    trajectory.prompt_ids, trajectory.token_ids = [], []
    trajectory.mask, trajectory.logprobs = [], []
    trajectory.turns, trajectory.end_reason, trajectory.truncated = 0, None, False
    trajectory.calls, trajectory.submission, trajectory.earned = [], None, None
    trajectory.timings = Timings()
    trajectory.attempts += 1
