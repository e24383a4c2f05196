"""A Python session inside a sandbox: programs of an episode that share their names.

Nothing is installed in the sandbox: each run brings the session's program along (12 KB), and starts the session
if none lives. A session ends with its sandbox.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from sandyard.envs.base import Execution, StepResult
from sandyard.envs.code import RUN_PYTHON, SUBMIT_SOLUTION
from sandyard.envs.observation import render_session_run
from sandyard.envs.process.inside.caller import DIED, STOPPED, STOPPED_LOST
from sandyard.envs.remote import is_shell_text
from sandyard.envs.sandbox import SandboxEnv

LOST = "[the session is over: all names of earlier runs are gone]"
_PACKAGE = "sandyard.envs.process.inside"
_START_GRACE = 30.0  # seconds that starting, interrupting and ending may take beyond the program's own
_INLINE = 64 << 10


class PersistentPython:
    """The session of `env`'s sandbox. One program at a time; `run` may be called again after any outcome."""

    def __init__(self, env: SandboxEnv) -> None:
        self._env = env
        self._name = f"session-{secrets.token_hex(8)}"

    async def run(self, code: str, timeout: float) -> tuple[Execution, bool]:
        """Run a program among the names of the earlier ones; also, whether those are gone now.

        A program that runs too long is interrupted, and killed with the session if that does not end it.
        Raises `SandboxError`, `GuestError` as `SandboxEnv.run`."""
        command = f"python3 -I -c {shlex.quote(_program(self._name, timeout))}"
        raw = await self._env.run(await self._with_input(command, code), timeout=timeout + _START_GRACE)
        lost = raw.exit_code in (STOPPED_LOST, DIED)
        if raw.exit_code in (STOPPED, STOPPED_LOST):
            return replace(raw, exit_code=None, timed_out=True, duration=timeout), lost
        return (replace(raw, exit_code=None), True) if lost else (raw, False)

    async def _with_input(self, command: str, code: str) -> str:
        source = code.encode("utf-8", "surrogatepass")
        if len(source) <= _INLINE and is_shell_text(code):
            mark = f"END_{secrets.token_hex(8)}"
            return f"exec {command} <<'{mark}'\n{code}\n{mark}\n"
        path = f"/tmp/program-{secrets.token_hex(8)}.py"
        await self._env.write_file(path, source)
        return f"exec 3<{path}; rm -f {path}; exec {command} <&3 3<&-"


class SessionSandboxEnv(SandboxEnv):
    """`run_python` in one session an episode, and `submit_solution`; options as `SandboxEnv`."""

    def __init__(self, template: str = "base", *, run_timeout: float = 10.0, **options: Any) -> None:
        super().__init__(template, include_default_tools=False, **options)
        self._run_timeout = run_timeout
        self._python = PersistentPython(self)
        self.register_tool(RUN_PYTHON, lambda env, arguments: self._run_tool(arguments), own_limit=run_timeout)
        self.register_tool(SUBMIT_SOLUTION, lambda env, arguments: self.submit(arguments["code"]))

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Raw access, in the episode's session."""
        return (await self._python.run(code, timeout or self._run_timeout))[0]

    async def _run_tool(self, arguments: Mapping[str, Any]) -> StepResult:
        execution, state_lost = await self._python.run(arguments["code"], self._run_timeout)
        return render_session_run(execution, self.observation_limit, LOST if state_lost else None)


def _program(name: str, timeout: float) -> str:
    return f"{_modules()}\nsys.modules['{_PACKAGE}.caller'].call({name!r}, {timeout!r})"


@cache
def _modules() -> str:
    """Source that makes the two modules of the session, wherever the package is not installed."""
    sources = [
        (f"{_PACKAGE}.{name}", (resources.files(_PACKAGE) / f"{name}.py").read_text()) for name in ("driver", "caller")
    ]
    parents = ("sandyard", "sandyard.envs", "sandyard.envs.process", _PACKAGE)
    return (
        "import json, sys, types\n"
        f"for name in {parents!r}: sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = []\n"
        f"for name, source in json.loads({json.dumps(sources)!r}):\n"
        "    module = sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(source, name, 'exec', dont_inherit=True), module.__dict__)"
    )
