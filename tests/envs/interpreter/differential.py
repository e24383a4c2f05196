"""Programs in both: what differs and was not refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandyard.envs.base import StepStatus
from sandyard.envs.interpreter import Interpreter
from tests.envs.interpreter.oracle import run_in_cpython

OUTPUT_LIMIT = 1 << 20


@dataclass
class Comparison:
    """Of a number of programs: how each ended in the interpreter, and those that ended otherwise in CPython."""

    statuses: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)


async def compare(programs: Sequence[str], *, timeout: float = 20.0) -> Comparison:
    """Run `programs` in both, each as a session of its own."""
    comparison = Comparison()
    expected = run_in_cpython(programs)
    async with Interpreter(hash_seed=0, output_limit=OUTPUT_LIMIT) as interpreter:
        for program, (printed, error) in zip(programs, expected, strict=True):
            stdout = _kept(printed)
            await interpreter.reset()
            result = await interpreter.run(program, timeout=timeout)
            comparison.statuses[result.status] += 1
            comparison.accepted.append(result.status in (StepStatus.OK, StepStatus.TASK_FAILED))
            if result.refusal is not None:
                comparison.refused[result.refusal.construct] += 1
                continue
            answer = (result.stdout, result.error)
            if result.status is not StepStatus.TIMEOUT and error is not None and answer != (stdout, error):
                comparison.different.append(f"{program}\n# CPython:     {stdout!r} {error!r}\n# interpreter: {answer}")
    return comparison


def _kept(printed: str) -> str:
    """What the interpreter keeps of so much output."""
    cut = len(printed) - OUTPUT_LIMIT
    return printed if cut <= 0 else f"{printed[:OUTPUT_LIMIT]}\n[... {cut} more characters were not kept ...]\n"
