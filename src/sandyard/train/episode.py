"""One policy playing one task in one env, token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sandyard.envs.base import Env, StepResult, StepStatus
from sandyard.envs.ledger import Ledger
from sandyard.envs.observation import cut_text
from sandyard.errors import TaskError
from sandyard.tasks.base import Task
from sandyard.train.deadlines import Deadlines
from sandyard.train.failures import DeadlineExceeded, EnvFailed
from sandyard.train.policies.base import FinishReason, Generation, Message, ParsedTurn, Policy, SamplingParams
from sandyard.train.seeds import derive_seed
from sandyard.train.trajectory import Call, EndReason, Trajectory

T = TypeVar("T")
# Calls of one turn that are done. Without a bound a policy could fill a rollout's time with calls that each
# keep to theirs, and be masked for it.
MAX_CALLS = 8
BuildMessages = Callable[[Task, str], Sequence[Message]]  # (task, what reset said) → conversation


def system_and_user(system_prompt: str) -> BuildMessages:
    """The usual conversation: the back end's system prompt, then the task (and what reset said)."""

    def build(task: Task, observation: str) -> list[Message]:
        user = f"{task.prompt}\n\n{observation}" if observation else task.prompt
        return [{"role": "system", "content": system_prompt}, {"role": "user", "content": user}]

    return build


async def within(awaitable: Awaitable[T], name: str, seconds: float) -> T:
    """Await with a deadline of ours; raises `DeadlineExceeded`."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await awaitable
    except TimeoutError as error:
        if not scope.expired():
            raise  # somebody else's timeout
        raise DeadlineExceeded(name, seconds) from error


@dataclass(slots=True)
class Episode:
    """Plays `trajectory` in `env`, which is made and closed by the caller.

    `observed` becomes true when the policy has seen an answer: from then on the rollout cannot be
    played again elsewhere as if nothing had happened.
    """

    policy: Policy
    env: Env
    task: Task
    trajectory: Trajectory
    build_messages: BuildMessages
    params: SamplingParams
    max_turns: int
    observation_limit: int
    deadlines: Deadlines
    observed: bool = False
    ledger: Ledger = field(default_factory=Ledger)

    async def play(self) -> None:
        """Fill the trajectory up to its end reason. Raises what the env raises, `EnvFailed`,
        `DeadlineExceeded`, and `TaskError` for a prompt that the model cannot hold; never for what the
        policy does."""
        record = self.trajectory
        started = time.perf_counter()
        first = await within(self.env.reset(self.task), "step", self.deadlines.step)
        record.timings.create = time.perf_counter() - started
        if first.status is StepStatus.INFRA_ERROR:
            raise EnvFailed(f"reset: {first.observation}")
        self.ledger.record(first)
        tools = [tool.to_openai() for tool in self.env.tools()]
        record.prompt_ids = self.policy.render_prompt(self.build_messages(self.task, first.observation), tools)
        if len(record.prompt_ids) >= self.policy.max_length:
            raise TaskError(
                f"task {self.task.task_id}: its prompt is {len(record.prompt_ids)} tokens, the policy holds "
                f"{self.policy.max_length}"
            )
        while record.end_reason is None:
            await self._turn()
        record.submission, record.earned = self.env.submission, self.ledger.reward

    async def _turn(self) -> None:
        record = self.trajectory
        turn = await self._generate()
        if turn is None:
            self._end(EndReason.LENGTH)
            return
        record.turns += 1
        cut = turn.finish_reason is FinishReason.LENGTH
        record.truncated = record.truncated or cut
        parsed = self.policy.parse_turn(turn.token_ids)
        names, answers, done = await self._act(parsed)
        last = record.turns >= self.max_turns
        if done:
            self._end(EndReason.DONE)
        elif parsed.error is None and not parsed.calls:
            self._end(EndReason.STOP_CALLING)
        elif last:
            self._end(EndReason.LENGTH if cut else EndReason.MAX_TURNS)
        else:
            self._observe(turn, names, answers)

    async def _generate(self) -> Generation | None:
        """The next turn, or None if there is no room for a token."""
        record = self.trajectory
        context = [*record.prompt_ids, *record.token_ids]
        if len(context) >= self.policy.max_length:
            return None
        seed = derive_seed(record.seed, record.turns)
        params = SamplingParams(self.params.max_tokens, self.params.temperature, seed)
        started = time.perf_counter()
        turn = await self.policy.generate(context, params)
        record.timings.generate += time.perf_counter() - started
        record.append_sampled(turn.token_ids, turn.logprobs)
        return turn if turn.token_ids else None

    async def _act(self, parsed: ParsedTurn) -> tuple[list[str], list[str], bool]:
        """Do the calls of a turn in order; (tool names, answers, is the episode over)."""
        error = parsed.error
        if len(parsed.calls) > MAX_CALLS:
            error = f"Error: {len(parsed.calls)} tool calls in one turn, at most {MAX_CALLS}; nothing was executed."
        if error is not None:
            self.trajectory.calls.append(Call("", StepStatus.INVALID_CALL))
            return [""], [error], False
        names: list[str] = []
        answers: list[str] = []
        for call in parsed.calls:
            result = await self._step(call.name, call.arguments)
            names.append(call.name)
            answers.append(cut_text(result.observation, self.observation_limit))
            if result.done:
                return names, answers, True
        return names, answers, False

    async def _step(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        started = time.perf_counter()
        result = await within(self.env.step(name, arguments), "step", self.deadlines.step)
        seconds = time.perf_counter() - started
        self.trajectory.timings.env += seconds
        if result.status is StepStatus.INFRA_ERROR:
            raise EnvFailed(f"{name}: {result.observation}")
        self.ledger.record(result)
        self.trajectory.calls.append(Call(name, result.status, seconds))
        return result

    def _observe(self, turn: Generation, names: Sequence[str], answers: Sequence[str]) -> None:
        record = self.trajectory
        glue = [*self.policy.close_turn(turn.token_ids), *self.policy.render_observation(names, answers)]
        # An answer that leaves no room to reply is not cut: it ends the rollout.
        if len(record.prompt_ids) + len(record.token_ids) + len(glue) >= self.policy.max_length:
            self._end(EndReason.LENGTH)
            return
        record.append_observed(glue)
        self.observed = True

    def _end(self, reason: EndReason) -> None:
        self.trajectory.end_reason = reason
        if reason is EndReason.LENGTH:
            self.trajectory.truncated = True
