"""A sandbox as an MCP server offers it: made by the first call, kept while there are calls, never replaced unsaid."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sandyard.envs.base import StepResult, StepStatus, ToolSpec
from sandyard.envs.code import add_run_python
from sandyard.envs.sandbox import SandboxEnv
from sandyard.envs.tools import ToolManager
from sandyard.errors import CapacityError, SandboxError

logger = logging.getLogger(__name__)

LIST_FILES = ToolSpec(
    "list_files",
    "List a directory: type and permissions, owner, size, time and name of each entry.",
    {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "the home directory if left out"}},
        "additionalProperties": False,
    },
)


def add_sandbox_tools(env: SandboxEnv) -> SandboxEnv:
    """`list_files` and `run_python` beside the env's own `run_command`, `read_file` and `write_file`."""

    async def list_files(env: SandboxEnv, arguments: Mapping[str, Any]) -> StepResult:
        return env.render(await env.run(f"ls -lA -- {shlex.quote(arguments.get('path', '.'))}"))

    env.register_tool(LIST_FILES, list_files)
    add_run_python(env)
    return env


class SandboxYard:
    """Tools over one sandbox of `make_env`, which lives on for `idle` seconds after the last call.

    Calls may overlap. Nothing is raised: a failure is an answer, one of the sandbox INFRA_ERROR."""

    def __init__(self, make_env: Callable[[], SandboxEnv], idle: float) -> None:
        self._make_env = make_env
        self._idle = idle
        self._env: SandboxEnv | None = None
        self._making = asyncio.Lock()
        self._extended_at = 0.0
        self._manager: ToolManager = add_sandbox_tools(make_env()).manager

    def tools(self) -> Sequence[ToolSpec]:
        return self._manager.specs()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        try:
            env = await self._ready()
            await self._extend(env)
            return await env.step(name, arguments)
        except CapacityError as error:
            return StepResult(f"There is no room for a sandbox: {error}", status=StepStatus.INFRA_ERROR)
        except SandboxError as error:
            await self.close()
            text = f"The sandbox is gone with its files: {error}. The next call gets a new one."
            return StepResult(text, status=StepStatus.INFRA_ERROR)

    async def close(self) -> None:
        """Kill the sandbox, if there is one."""
        env, self._env = self._env, None
        if env is not None:
            await env.close()

    async def _ready(self) -> SandboxEnv:
        async with self._making:
            if self._env is None:
                env = add_sandbox_tools(self._make_env())
                try:
                    await env.reset()
                except BaseException:
                    await env.close()
                    raise
                self._env, self._extended_at = env, time.monotonic()
            return self._env

    async def _extend(self, env: SandboxEnv) -> None:
        """Its lifetime begins anew with a call, but for calls that follow closely."""
        now = time.monotonic()
        if now - self._extended_at > self._idle / 4:
            self._extended_at = now
            try:
                await env.sandbox.set_timeout(round(self._idle))
            except Exception as error:  # noqa: BLE001 - what is wrong with the sandbox the call itself finds out
                logger.warning("the lifetime of sandbox %s was not extended: %s", env.sandbox.sandbox_id, error)
