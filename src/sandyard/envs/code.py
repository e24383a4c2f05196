"""The two tools of the code recipe, on any env: try a program, submit the final one.

`submit_solution` is bookkeeping on this side: what is submitted never enters the policy's sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sandyard.envs.base import StepResult, ToolSpec
from sandyard.envs.toolenv import ToolEnv

_CODE = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source"}},
    "required": ["code"],
    "additionalProperties": False,
}
RUN_PYTHON = ToolSpec("run_python", "Run a Python program and return what it prints.", _CODE)
SUBMIT_SOLUTION = ToolSpec("submit_solution", "Submit the final solution. Ends the episode.", _CODE)
TOOL_SCHEMA = (RUN_PYTHON, SUBMIT_SOLUTION)


EnvT = TypeVar("EnvT", bound=ToolEnv)


def add_run_python(env: ToolEnv, *, run_timeout: float | None = None) -> None:
    """Register `run_python` on `env`; a run is stopped after `run_timeout` s, else when `env.execute` says."""

    async def run_python(env: ToolEnv, arguments: Mapping[str, Any]) -> StepResult:
        return env.render(await env.execute(arguments["code"], timeout=run_timeout))

    env.register_tool(RUN_PYTHON, run_python, own_limit=run_timeout)


def add_code_tools(env: EnvT, *, run_timeout: float = 10.0) -> EnvT:
    """Register `run_python` and `submit_solution` on `env`; a run is stopped after `run_timeout` s."""

    def submit_solution(env: ToolEnv, arguments: Mapping[str, Any]) -> StepResult:
        return env.submit(arguments["code"])

    add_run_python(env, run_timeout=run_timeout)
    env.register_tool(SUBMIT_SOLUTION, submit_solution)
    return env
