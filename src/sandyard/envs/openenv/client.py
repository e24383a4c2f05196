"""An `Env` that lives on any OpenEnv server."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import httpx

from sandyard.envs.base import Env, Execution, StepResult, ToolSpec
from sandyard.envs.openenv.dialect import (
    STEP_TOOL,
    Dialect,
    fields_tool,
    find_dialect,
    plain_reset,
    read_result,
    read_tools,
    step_data,
)
from sandyard.envs.openenv.failures import ServerFault, SessionLost
from sandyard.envs.openenv.link import Link
from sandyard.envs.openenv.protocol import ErrorCode, Message
from sandyard.envs.tools import invalid_call
from sandyard.errors import BadRequest, CapacityError, Conflict, CreateFailed, SandyardError, Unsupported
from sandyard.tasks.base import Task

_SUBMIT = "submit_solution"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Deadlines in seconds. `capacity_wait`: how long a full server is asked again. `concurrent`: what
    a call does while another is on its way. `max_message`: bytes of an answer; a longer one ends the session."""

    headers: Mapping[str, str] = field(default_factory=dict)
    connect_timeout: float = 10.0
    reset_timeout: float = 120.0
    step_timeout: float = 120.0
    capacity_wait: float = 30.0
    max_message: int = 100 << 20
    concurrent: Literal["queue", "refuse"] = "queue"


class OpenEnvClient(Env):
    """One session on the server at `base_url` (else `OPENENV_BASE_URL`).

    An answer is that of its request, or there is none: a call that is given up or times out ends the
    session, that call and every later one raise `SessionLost`, and only `reset` begins a new session.
    A full server is asked again with growing pauses, then `CapacityError`. What the server cannot do
    is `ServerFault` or `CreateFailed`; an action that does not fit its schema is INVALID_CALL.

    `tools()` is known after `connect` or the first `reset`. A server that takes plain fields has one
    tool, `step`, whose arguments they are. Rewards are the server's, as they came.
    """

    lives_elsewhere = "in a session of the OpenEnv server"

    def __init__(self, base_url: str | None = None, options: ClientOptions | None = None) -> None:
        url = base_url or os.environ.get("OPENENV_BASE_URL")
        if not url:
            raise BadRequest("no address of an OpenEnv server", remedy="give base_url or set OPENENV_BASE_URL")
        self.base_url, self._ws_url = _addresses(url)
        self.options = options or ClientOptions()
        self._lock = asyncio.Lock()
        self._link: Link | None = None
        self._dialect = Dialect.TOOL
        self._specs: list[ToolSpec] | None = None
        self._over = False
        self._submission: str | None = None

    async def connect(self) -> None:
        """Open a session unless one lives, and learn the tools. Raises `SessionLost` where it was lost."""
        async with self._turn():
            if self._link is None:
                await self._begin()
            elif self._link.lost is not None:
                raise SessionLost(self._link.lost)

    async def reset(self, task: Task | None = None) -> StepResult:
        """Begin an episode; in a new session where the old one was lost. `episode_id` is the task's id,
        `seed` and the rest of its metadata go with it, its prompt too where the server is ours; its
        tests and its reference never do."""
        async with self._turn():
            if self._link is not None and self._link.lost is not None:
                await self._drop()
            if self._link is None:
                await self._begin()
            data = plain_reset(task.metadata, task.task_id) if task else {}
            if task and task.prompt and self._dialect is Dialect.TOOL:
                data["prompt"] = task.prompt
            message = await self._ask({"type": "reset", "data": data}, "observation", self.options.reset_timeout)
            if message["type"] == "error":
                raise _explain(message)
            self._submission = None
            result = self._read(message)
            self._over = result.done
            return result

    async def step(self, tool_name: str, arguments: Mapping[str, Any]) -> StepResult:
        async with self._turn():
            self._require_link()
            if self._over:
                return invalid_call("The episode is over.")
            if self._dialect is Dialect.FIELDS and tool_name != STEP_TOOL:
                return invalid_call(f"There is no tool {tool_name[:100]!r}. The tools are: {STEP_TOOL}.")
            request = {"type": "step", "data": step_data(self._dialect, tool_name, arguments)}
            message = await self._ask(request, "observation", self.options.step_timeout)
            if message["type"] == "error":
                return _refused_action(message)
            result = self._read(message)
            self._over = result.done
            if tool_name == _SUBMIT and result.terminated and isinstance(arguments.get("code"), str):
                self._submission = arguments["code"]
            return result

    async def state(self) -> dict[str, Any]:
        """The server's state of the episode: `episode_id`, `step_count` and what else it tells."""
        async with self._turn():
            self._require_link()
            message = await self._ask({"type": "state"}, "state", self.options.step_timeout)
            if message["type"] == "error":
                raise _explain(message)
            data: dict[str, Any] = message["data"]
            return data

    def tools(self) -> Sequence[ToolSpec]:
        if self._specs is None:
            raise Conflict("the server's tools are not known yet", remedy="call connect or reset first")
        return self._specs

    async def execute(self, code: str, *, timeout: float | None = None) -> Execution:
        """Always raises `Unsupported`: OpenEnv knows no way past the episode."""
        raise Unsupported("an OpenEnv session runs nothing outside its episode", remedy="score with a verifier")

    @property
    def submission(self) -> str | None:
        return self._submission

    async def close(self) -> None:
        """Idempotent. A call on its way is waited for."""
        async with self._lock:
            await self._drop()

    async def __aenter__(self) -> Self:
        try:
            await self.connect()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._lock.locked() and self.options.concurrent == "refuse":
            raise Conflict("another call of this client is on its way", remedy="await it, or use a client each")
        async with self._lock:
            yield

    async def _begin(self) -> None:
        """A session with its tools. A full server says so only after the handshake: hence the first question."""
        give_up = time.monotonic() + self.options.capacity_wait
        pause = _FIRST_PAUSE
        if self._specs is None:
            schema = await self._fetch_schema()
            self._dialect = find_dialect(schema)
        else:
            schema = {}
        while True:
            try:
                await self._open_session(schema)
                return
            except CapacityError:
                await self._drop()
                if time.monotonic() + pause > give_up:
                    raise
            except BaseException:
                await self._drop()
                raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _open_session(self, schema: Mapping[str, Any]) -> None:
        options = self.options
        self._link = await Link.open(
            self._ws_url, headers=options.headers, timeout=options.connect_timeout, max_message=options.max_message
        )
        self._over = False
        listing = self._specs is None and self._dialect is not Dialect.FIELDS
        request = {"type": "step", "data": {"type": "list_tools"}} if listing else {"type": "state"}
        expected = "observation" if listing else "state"
        message = await self._ask(request, expected, options.step_timeout)
        if message["type"] == "error":
            raise _explain(message)
        if listing:
            observation = message["data"].get("observation") or {}
            self._specs = read_tools(observation.get("tools"))
        elif self._specs is None:
            self._specs = [fields_tool(schema, self.base_url)]

    async def _fetch_schema(self) -> dict[str, Any]:
        """The schema of the server's actions."""
        try:
            async with httpx.AsyncClient(timeout=self.options.connect_timeout) as client:
                answer = await client.get(f"{self.base_url}/schema", headers=dict(self.options.headers))
            answer.raise_for_status()
            action = answer.json()["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            why = str(error) or type(error).__name__
            raise CreateFailed("connect", f"{self.base_url}/schema: {why}") from error
        return action if isinstance(action, dict) else {}

    def _require_link(self) -> Link:
        if self._link is None:
            raise Conflict("the env is closed", remedy="call reset first")
        return self._link

    async def _ask(self, request: Message, expected: str, timeout: float) -> Message:
        link = self._require_link()
        message = await link.ask(request, expected, timeout)
        if message["type"] == "error" and message["data"].get("code") == ErrorCode.SESSION_ERROR:
            link.lose(f"the server ended the session: {message['data'].get('message')}")
        return message

    def _read(self, message: Message) -> StepResult:
        try:
            return read_result(message)
        except BadRequest as error:
            raise ServerFault("observation", error.message) from error

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()


def _addresses(url: str) -> tuple[str, str]:
    """The addresses for HTTP and for the session."""
    base = url.rstrip("/")
    scheme, colon, rest = base.partition("://")
    schemes = {"http": ("http", "ws"), "ws": ("http", "ws"), "https": ("https", "wss"), "wss": ("https", "wss")}
    if not colon or not rest or scheme not in schemes:
        raise BadRequest(f"{url!r} is not an address of http(s) or ws(s)", field="base_url")
    web, ws = schemes[scheme]
    return f"{web}://{rest}", f"{ws}://{rest}/ws"


def _refused_action(message: Message) -> StepResult:
    """An action that does not fit the server's schema is the policy's; every other error is raised."""
    data = message["data"]
    if data.get("code") != ErrorCode.VALIDATION_ERROR:
        raise _explain(message)
    details = data.get("errors")
    text = f"{data.get('message')}: {details}" if details else str(data.get("message"))
    return invalid_call(f"The action does not fit: {text[:2000]}")


def _explain(message: Message) -> SandyardError:
    """The error that the server's stands for."""
    data = message["data"]
    code, text = str(data.get("code")), str(data.get("message"))[:2000]
    if code == ErrorCode.CAPACITY_REACHED or data.get("boundary") == "capacity":
        wait = data.get("retry_after")
        return CapacityError(text, retry_after=float(wait) if isinstance(wait, int | float) else 1.0)
    if code == ErrorCode.FACTORY_ERROR:
        return CreateFailed("factory", text)
    if code == ErrorCode.SESSION_ERROR:
        return SessionLost(f"the server ended the session: {text}")
    if data.get("boundary") == "client":
        return Conflict(text)
    if code in (ErrorCode.VALIDATION_ERROR, ErrorCode.UNKNOWN_TYPE, ErrorCode.INVALID_JSON):
        return BadRequest(f"the OpenEnv server answered {code}: {text}")
    return ServerFault(code, text)
