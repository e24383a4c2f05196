"""The record of one rollout: what was sampled, what was observed, how it ended, what it earned."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sandyard.envs.base import StepStatus
from sandyard.errors import BadRequest
from sandyard.verify.base import TestOutcome, TestResult, Verdict


class EndReason(StrEnum):
    STOP_CALLING = "stop_calling"  # a turn without a tool call
    MAX_TURNS = "max_turns"
    LENGTH = "length"  # no room left, or the last turn was cut
    DONE = "done"  # the env said so


@dataclass(slots=True)
class Call:
    """One tool call and its answer. `seconds` is how long the env took; a turn that could not be parsed
    is a call of no tool ("")."""

    tool: str
    status: StepStatus
    seconds: float = 0.0


@dataclass(slots=True)
class Timings:
    """Seconds. `generate` and `env` are waiting times of this trajectory, `create` is its reset."""

    create: float = 0.0
    generate: float = 0.0
    env: float = 0.0
    verify: float = 0.0
    total: float = 0.0


@dataclass(slots=True)
class Trajectory:
    """`token_ids` follow `prompt_ids`; `mask` is 1 where a token was sampled and 0 where it was observed,
    `logprobs` is aligned with them (0.0 where observed).

    `reward` is None if and only if `masked` names why the rollout is not scored ("sandbox:oom",
    "capacity", "verifier", "deadline:step", ...); `detail` then holds the error's text. `earned` is the sum
    of the rewards that the env itself gave, None if it gave none. `failures` are the reasons of tries that
    were given up before. `group` is the index of the rollout's group in its batch, `sample` its index in the
    group.
    """

    task_id: str
    family: str = ""
    group: int = 0
    sample: int = 0
    seed: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    end_reason: EndReason | None = None
    truncated: bool = False
    calls: list[Call] = field(default_factory=list)
    submission: str | None = None
    earned: float | None = None
    verdict: Verdict | None = None
    reward: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    masked: str | None = None
    detail: str | None = None
    attempts: int = 1
    failures: list[str] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    @property
    def solved(self) -> bool:
        """Submitted, and every test passed."""
        verdict = self.verdict
        return verdict is not None and verdict.submitted and 0 < verdict.total == verdict.passed

    @property
    def tool_errors(self) -> int:
        """Calls that could not be made: no such tool, bad arguments, a turn that does not parse."""
        return sum(call.status is StepStatus.INVALID_CALL for call in self.calls)

    @property
    def sampled_tokens(self) -> int:
        return sum(self.mask)

    def append_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.mask.extend([1] * len(token_ids))

    def append_observed(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.mask.extend([0] * len(token_ids))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Trajectory:
        """The inverse of `to_json`; keys it does not know (texts, step numbers) are left out."""
        known = {key: item for key, item in value.items() if key in cls.__dataclass_fields__}
        known["calls"] = [Call(c["tool"], StepStatus(c["status"]), c["seconds"]) for c in known.get("calls", ())]
        known["timings"] = Timings(**known.get("timings", {}))
        if known.get("end_reason") is not None:
            known["end_reason"] = EndReason(known["end_reason"])
        if known.get("verdict") is not None:
            known["verdict"] = _verdict(known["verdict"])
        return cls(**known)


def write_trajectories(
    path: Path,
    trajectories: Iterable[Trajectory],
    decode: Callable[[Sequence[int]], str] | None = None,
    **labels: Any,
) -> None:
    """Append one JSON line per trajectory to `path`. `labels` (such as `step=3`) go into every line; with
    `decode` the line also has `prompt` and `text`, for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A policy can write half of a surrogate pair; as `\\udXXX` inside a JSON string it is read back as it was.
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        for trajectory in trajectories:
            line = {**labels, **trajectory.to_json()}
            if decode is not None:
                line |= {"prompt": decode(trajectory.prompt_ids), "text": decode(trajectory.token_ids)}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a trajectory file as they were written. Raises `BadRequest` naming file and line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise BadRequest(f"{path}:{number} is not JSON ({error})") from error
            if not isinstance(value, dict):
                raise BadRequest(f"{path}:{number} is not an object")
            yield value


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file written by `write_trajectories`."""
    return [Trajectory.from_json(line) for line in read_lines(path)]


def _verdict(value: dict[str, Any]) -> Verdict:
    results = tuple(TestResult(r["index"], TestOutcome(r["outcome"]), r["detail"]) for r in value["results"])
    return Verdict(value["submitted"], value["passed"], value["total"], results)
