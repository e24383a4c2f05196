"""One session: one env and its episode, whatever carries the messages."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sandyard.envs.base import Env, StepResult
from sandyard.envs.openenv.actions import Action, ActionForm, read_action
from sandyard.envs.openenv.observations import (
    code_fields,
    envelope,
    list_fields,
    run_result,
    text_fields,
    tool_fields,
    tool_result,
)
from sandyard.envs.openenv.protocol import ErrorCode, Fault, Message, Request
from sandyard.errors import CapacityError, SandyardError
from sandyard.tasks.base import Task

logger = logging.getLogger(__name__)
_RUN = "run_python"
_RPC_INVALID, _RPC_NO_METHOD, RPC_PARAMS, RPC_SERVER = -32600, -32601, -32602, -32000


class Session:
    """Answers requests one at a time, in order. What the env raises becomes EXECUTION_ERROR; so does
    `SystemExit`, which ends a step and not its server. A step or reset of more than `step_timeout` seconds ends
    its episode: nobody knows what it did to the env. `close` releases the env."""

    def __init__(self, env: Env, *, step_timeout: float) -> None:
        self.env = env
        self._step_timeout = step_timeout
        self.episode_id: str | None = None
        self.step_count = 0
        self._running = False
        self._done = False
        self._runs_code = any(spec.name == _RUN for spec in env.tools())

    async def answer(self, request: Request) -> Message:
        """The answer to anything but `close`."""
        try:
            match request.kind:
                case "reset":
                    return await self._reset(request.data)
                case "step":
                    return await self._step(request.data)
                case "mcp":
                    return {"type": "mcp", "data": await self.answer_rpc(request.data)}
            return {"type": "state", "data": self.state()}
        except Fault as fault:
            return fault.to_message()

    def state(self) -> dict[str, Any]:
        return {"episode_id": self.episode_id, "step_count": self.step_count, "done": self._done}

    def abandon(self) -> None:
        """The episode is lost; a reset begins another."""
        self._running = False

    async def close(self) -> None:
        """Release the env; a failure is logged: nobody is left to be told."""
        self._running = False
        try:
            await self.env.close()
        except (Exception, SystemExit):  # a foreign env's close must not keep the seat
            logger.exception("an env did not close")

    async def _reset(self, data: Mapping[str, Any]) -> Message:
        task = read_task(data)
        self._running = False
        result = await self._guarded("reset", self.env.reset(task))
        self.episode_id, self.step_count = task.task_id, 0
        self._running, self._done = True, result.done
        return envelope(result, self._fields(result))

    async def _step(self, data: Mapping[str, Any]) -> Message:
        action = read_action(data, self.env.tools())
        if action.form is ActionForm.LIST_TOOLS:
            return envelope(StepResult(), list_fields(self.env.tools()))
        result, fields = await self._act(action)
        return envelope(result, fields)

    async def _act(self, action: Action) -> tuple[StepResult, dict[str, Any]]:
        self._require_episode()
        arguments = action.arguments or {}
        if action.form is ActionForm.PLAIN and action.tool == _RUN and isinstance(arguments["code"], str):
            result, fields = run_result(await self._guarded("step", self.env.execute(arguments["code"])))
        else:
            result = await self._guarded("step", self.env.step(action.tool, arguments))
            called = action.form is ActionForm.CALL_TOOL
            fields = tool_fields(action.tool, result) if called else self._fields(result)
        self.step_count += 1
        self._done = result.done
        return result, fields

    def _fields(self, result: StepResult) -> dict[str, Any]:
        return code_fields(result) if self._runs_code else text_fields(result)

    def _require_episode(self) -> None:
        if not self._running:
            raise Fault(ErrorCode.EXECUTION_ERROR, "no episode is running; send reset first", boundary="client")
        if self._done:
            raise Fault(
                ErrorCode.EXECUTION_ERROR, "the episode is over; send reset to begin another", boundary="client"
            )

    async def _guarded(self, what: str, work: Any) -> Any:
        scope = asyncio.timeout(self._step_timeout)
        try:
            async with scope:
                return await work
        except SandyardError as error:
            more = {"retry_after": error.retry_after} if isinstance(error, CapacityError) else {}
            raise Fault(
                ErrorCode.EXECUTION_ERROR,
                f"{what}: {error}",
                boundary=str(error.boundary),
                error=type(error).__name__,
                **more,
            ) from error
        except (Exception, SystemExit) as error:  # a foreign env may raise anything: the step ends
            if scope.expired():
                self.abandon()
                text = f"{what}: not done after {self._step_timeout:g} s; the episode is lost, send reset"
                raise Fault(ErrorCode.EXECUTION_ERROR, text, boundary="sandbox") from error
            logger.exception("%s of an env failed", what)
            raise Fault(ErrorCode.EXECUTION_ERROR, f"{what}: {type(error).__name__}: {error}") from error

    async def answer_rpc(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """MCP: `tools/list` and `tools/call`; a call is a step of the episode."""
        number, method, params = call.get("id"), call.get("method"), call.get("params", {})
        if call.get("jsonrpc") != "2.0" or not isinstance(method, str):
            return rpc_error(number, _RPC_INVALID, "not a JSON-RPC 2.0 request")
        if method == "tools/list":
            tools = [
                {"name": s.name, "description": s.description, "inputSchema": dict(s.parameters)}
                for s in self.env.tools()
            ]
            return {"jsonrpc": "2.0", "id": number, "result": {"tools": tools}}
        if method != "tools/call":
            return rpc_error(number, _RPC_NO_METHOD, f"no method {method[:100]!r}; known: tools/list, tools/call")
        if not isinstance(params, dict) or not isinstance(params.get("name"), str):
            return rpc_error(number, RPC_PARAMS, "tools/call needs a name and arguments")
        try:
            action = read_action(
                {"type": "call_tool", "tool_name": params["name"], "arguments": params.get("arguments", {})}, ()
            )
            result, _ = await self._act(action)
        except Fault as fault:
            wrong = fault.code is ErrorCode.VALIDATION_ERROR
            return rpc_error(number, RPC_PARAMS if wrong else RPC_SERVER, str(fault))
        answer = tool_result(replace(result, info={})) | {"reward": result.reward, "done": result.done}
        return {"jsonrpc": "2.0", "id": number, "result": answer}


def rpc_error(number: object, code: int, message: str, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, **more}}


def read_task(data: Mapping[str, Any]) -> Task:
    """The task of a reset: `episode_id` names it, `prompt` opens it, everything is in its metadata (`seed`)."""
    episode, prompt, seed = data.get("episode_id"), data.get("prompt", ""), data.get("seed")
    if episode is not None and not isinstance(episode, str):
        raise Fault(ErrorCode.VALIDATION_ERROR, "reset: episode_id must be a text")
    if not isinstance(prompt, str):
        raise Fault(ErrorCode.VALIDATION_ERROR, "reset: prompt must be a text")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise Fault(ErrorCode.VALIDATION_ERROR, "reset: seed must be an integer")
    metadata = {key: value for key, value in data.items() if key not in ("episode_id", "prompt")}
    return Task(task_id=episode or uuid.uuid4().hex, prompt=prompt, metadata=metadata)
