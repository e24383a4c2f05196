"""Observations: what a policy reads, cut to a limit on character boundaries and saying what was cut."""

from __future__ import annotations

from dataclasses import replace

from sandyard.envs.base import Execution, StepResult, StepStatus

DEFAULT_LIMIT = 4000  # characters
_TAIL_SHARE = 0.25


def cut_text(text: str, limit: int = DEFAULT_LIMIT) -> str:
    """`text` in at most `limit` characters, its beginning and its end kept, with a note in between.

    Lone surrogates are replaced, so that the result always encodes as UTF-8.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= limit:
        return text
    note = f"\n[... {len(text)} characters, the middle is cut ...]\n"
    room = max(0, limit - len(note))
    tail = int(room * _TAIL_SHARE)
    return (text[: room - tail] + note + (text[-tail:] if tail else ""))[:limit]


def render_execution(execution: Execution, limit: int = DEFAULT_LIMIT) -> StepResult:
    """The answer to a command or a program: its output, then how it ended if not with exit code 0."""
    parts = [execution.stdout.rstrip("\n")]
    if execution.stderr.strip():
        parts.append(f"[stderr]\n{execution.stderr.rstrip()}")
    body = "\n".join(part for part in parts if part)
    ending, status = _ending(execution)
    text = cut_text(body, max(0, limit - len(ending) - 1))
    observation = "\n".join(part for part in (text, ending) if part) or "(no output)"
    info = {"exit_code": execution.exit_code, "timed_out": execution.timed_out, "duration": execution.duration}
    return StepResult(observation=observation, status=status, info=info)


def render_session_run(execution: Execution, limit: int, lost: str | None) -> StepResult:
    """`render_execution` of a run in a session; `lost` is what the policy is told where that is over, else None."""
    note = f"\n{lost}" if lost is not None else ""
    answer = render_execution(execution, limit - len(note))
    info = {**answer.info, "state_lost": lost is not None}
    return replace(answer, observation=answer.observation + note, info=info)


def _ending(execution: Execution) -> tuple[str, StepStatus]:
    if execution.timed_out:
        return f"[stopped: ran longer than {execution.duration:.0f} s]", StepStatus.TIMEOUT
    if execution.exit_code is None:
        return "[ended by a signal]", StepStatus.TASK_FAILED
    if execution.exit_code != 0:
        return f"[exit code {execution.exit_code}]", StepStatus.TASK_FAILED
    return "", StepStatus.OK
