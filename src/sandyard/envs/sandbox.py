"""The env over a sandbox of a Sandyard (or any E2B-compatible) server."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import e2b

from sandyard.connection import resolve_connection
from sandyard.envs.base import Execution, StepResult, ToolSpec
from sandyard.envs.commands import CommandTemplate
from sandyard.envs.lease import SandboxLease
from sandyard.envs.observation import DEFAULT_LIMIT
from sandyard.envs.remote import RemoteSandbox, is_shell_text
from sandyard.envs.toolenv import ToolEnv
from sandyard.envs.tools import parse_spec
from sandyard.errors import Conflict, CreateFailed, GuestError
from sandyard.tasks.base import Task

_INLINE_PROGRAM = 64 << 10  # bytes: above it the program is uploaded, one argument of exec being 128 KiB
_READ_LIMIT = 256 << 10  # characters of a file that a tool reads

RUN_COMMAND = ToolSpec(
    "run_command",
    "Run a shell command and return its output.",
    {
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the command, for bash"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
READ_FILE = ToolSpec(
    "read_file",
    "Return the content of a text file.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    },
)
WRITE_FILE = ToolSpec(
    "write_file",
    "Write a text file, making its directories.",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
        "additionalProperties": False,
    },
)


class SandboxEnv(ToolEnv):
    """One sandbox per episode: made in `reset`, killed in `close`.

    `setup_commands` run as root in order after creation; one that fails is `CreateFailed`.
    `sandbox_timeout` is the sandbox's lifetime, `command_timeout` that of one action (seconds).
    Raises `ConfigError` at once when no server is set.
    """

    lives_elsewhere = "in a sandbox of the server"

    def __init__(
        self,
        template: str = "base",
        api_url: str | None = None,
        api_key: str | None = None,
        *,
        sandbox_timeout: float = 300.0,
        command_timeout: float = 30.0,
        setup_commands: Sequence[str] = (),
        sandbox_envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        lease: SandboxLease | None = None,
        include_default_tools: bool = True,
        observation_limit: int = DEFAULT_LIMIT,
    ) -> None:
        super().__init__(observation_limit=observation_limit)
        use_lease = lease is not None and api_url is None and api_key is None
        self.connection = lease.connection if lease and use_lease else resolve_connection(api_url, api_key)
        self.template = template
        self.sandbox_timeout = sandbox_timeout
        self.command_timeout = command_timeout
        self._setup_commands = tuple(setup_commands)
        self._envs = dict(sandbox_envs or {})
        self._metadata = dict(metadata or {})
        self._lease = lease
        self._remote: RemoteSandbox | None = None
        if include_default_tools:
            self.register_tool(RUN_COMMAND, _run_command, own_limit=command_timeout)
            self.register_tool(READ_FILE, _read_file, own_limit=command_timeout)
            self.register_tool(WRITE_FILE, _write_file)

    @property
    def sandbox(self) -> e2b.AsyncSandbox:
        """The SDK's own handle of the running sandbox."""
        return self._live().handle

    def register_command_tool(
        self, schema: ToolSpec | Mapping[str, Any], command: str, *, timeout: float | None = None
    ) -> None:
        """A tool that runs `command` with its `{argument}` places filled, each as one shell word.

        Raises `BadRequest` for a place that cannot be filled safely (see `CommandTemplate`).
        """
        template = CommandTemplate(command, parse_spec(schema))

        async def run(env: SandboxEnv, arguments: Mapping[str, Any]) -> StepResult:
            return env.render(await env.run(template.fill(arguments), timeout=timeout))

        self.register_tool(schema, run, own_limit=timeout or self.command_timeout)

    async def run(self, command: str, *, timeout: float | None = None) -> Execution:
        """Run a shell command, raw. Raises `SandboxError`; `GuestError` if it could not start."""
        return await self._live().run(command, timeout=timeout or self.command_timeout)

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """A fresh `python3` in the user's home, without stdin. It sees what the sandbox's user has
        (files, packages, variables): who must not be fooled by those verifies elsewhere."""
        remote = self._live()
        source = code.encode("utf-8", "surrogatepass")
        if len(source) <= _INLINE_PROGRAM and is_shell_text(code):
            mark = f"END_{secrets.token_hex(8)}"
            command = f"exec python3 -u - <<'{mark}'\n{code}\n{mark}\n"
            return await remote.run(command, timeout=timeout or self.command_timeout)
        path = f"/tmp/program-{secrets.token_hex(8)}.py"
        await remote.write_file(path, source)
        return await remote.run(
            f"python3 -u {path} </dev/null; code=$?; rm -f {path}; exit $code", timeout=timeout or self.command_timeout
        )

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Raises `GuestError` when the sandbox refuses the path, `SandboxError`."""
        await self._live().write_file(path, content)

    def _live(self) -> RemoteSandbox:
        if self._remote is None:
            raise Conflict("the env has no sandbox", remedy="call reset first")
        return self._remote

    async def _acquire(self, task: Task | None) -> None:
        metadata = {**self._metadata, **(self._lease.metadata if self._lease else {})}
        if task is not None:
            metadata.setdefault("task", task.task_id)
        remote = await RemoteSandbox.create(
            self.connection, self.template, timeout=self.sandbox_timeout, envs=self._envs, metadata=metadata
        )
        try:
            for command in self._setup_commands:
                await self._set_up(remote, command)
        except BaseException:
            await remote.close()
            raise
        self._remote = remote

    async def _set_up(self, remote: RemoteSandbox, command: str) -> None:
        try:
            done = await remote.run(command, timeout=self.sandbox_timeout, user="root")
        except GuestError as error:
            raise CreateFailed("setup", f"{command!r} did not start: {error}") from error
        if done.timed_out or done.exit_code != 0:
            ending = (done.stderr or done.stdout).strip()[-300:]
            raise CreateFailed("setup", f"{command!r} ended with {done.exit_code}: {ending}")

    async def _release(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            await remote.close()


async def _run_command(env: SandboxEnv, arguments: Mapping[str, Any]) -> StepResult:
    return env.render(await env.run(arguments["command"]))


async def _read_file(env: SandboxEnv, arguments: Mapping[str, Any]) -> StepResult:
    return env.render(await env.run(f"head -c {_READ_LIMIT} -- {shlex.quote(arguments['path'])}"))


async def _write_file(env: SandboxEnv, arguments: Mapping[str, Any]) -> str:
    await env.write_file(arguments["path"], arguments["content"])
    return f"Wrote {len(arguments['content'])} characters to {arguments['path']}."
