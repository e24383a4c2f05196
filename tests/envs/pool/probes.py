"""Envs for pools, importable by their workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.envs.toolenv import ToolEnv
from sandyard.errors import CapacityError, CreateFailed, DeathReason, SandboxDied
from sandyard.tasks.base import Task

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_WORD: dict[str, Any] = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}


class OwnError(Exception):
    """Takes more than its text: a plain copy of it cannot be made."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(f"{text} {number}")


class ProbeEnv(ToolEnv):
    """`count` counts the episode's calls, `fail` fails in many ways, `wait` takes its time, `pid` tells it."""

    def __init__(self, *, fail_reset: str = "", close_seconds: float = 0.0) -> None:
        super().__init__()
        self._fail_reset = fail_reset
        self._close_seconds = close_seconds
        self._count = 0
        self._seed: object = None
        self.register_tool(ToolSpec("count", "Count.", _NOTHING), lambda env, arguments: self._next())
        self.register_tool(ToolSpec("fail", "Fail.", _WORD), lambda env, arguments: self._fail(arguments["how"]))
        self.register_tool(ToolSpec("wait", "Wait.", _NOTHING), lambda env, arguments: self._wait(), timeout=50.0)
        self.register_tool(ToolSpec("nap", "Wait a little.", _NOTHING), lambda env, arguments: self._nap())
        self.register_tool(ToolSpec("pid", "Tell.", _NOTHING), lambda env, arguments: str(os.getpid()))
        self.register_tool(ToolSpec("seed", "Tell.", _NOTHING), lambda env, arguments: str(self._seed))
        self.register_tool(ToolSpec("finish", "End.", _WORD), lambda env, arguments: self.submit(arguments["how"]))

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        if code == "die":
            os._exit(3)
        if code == "raise":
            raise SandboxDied("s1", DeathReason.OOM)
        return Execution(code, f"{self._count}", 0)

    def _next(self) -> StepResult:
        self._count += 1
        return StepResult(f"{self._count}", reward=float(self._count))

    async def _wait(self) -> str:
        await asyncio.sleep(40)
        return "waited"

    async def _nap(self) -> StepResult:
        started = time.monotonic()
        await asyncio.sleep(0.3)
        return StepResult("napped", info={"from": started, "to": time.monotonic()})

    def _fail(self, how: str) -> StepResult:
        match how:
            case "died":
                raise SandboxDied("s1", DeathReason.OOM, "too big")
            case "full":
                raise CapacityError("full", retry_after=7.0)
            case "own":
                raise OwnError("of mine", 3)
            case "exit":
                raise SystemExit(3)
            case "unpicklable":
                return StepResult("here", info={"lock": asyncio.Lock(), "code": lambda: 1})
            case "nan":
                return StepResult("here", reward=float("nan"))
            case "exit_process":
                os._exit(9)
        raise KeyError(how)

    async def _acquire(self, task: Task | None) -> None:
        if self._fail_reset and task is not None and task.task_id == self._fail_reset:
            raise CreateFailed("start", "no room in the inn")
        self._count = 0
        self._seed = task.metadata.get("seed") if task else None

    async def _release(self) -> None:
        await asyncio.sleep(self._close_seconds)


class Wedged(ProbeEnv):
    """Blocks its whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_tool(ToolSpec("wedge", "Block.", _NOTHING), lambda env, arguments: self._block())

    def _block(self) -> str:
        time.sleep(3600)
        return "never"


class Elsewhere(ProbeEnv):
    lives_elsewhere = "on the moon"


def make_elsewhere() -> Env:
    """A function, of which nobody can know beforehand what it makes."""
    return Elsewhere()


def make_nothing(**kwargs: Any) -> Mapping[str, Any]:
    return kwargs
