"""The HTTP side of a worker: what the env is, and stateless reset and step, each on an env of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sandyard.envs.openenv.actions import action_schema
from sandyard.envs.openenv.catalog import EnvSpec
from sandyard.envs.openenv.conversation import Receive, Send
from sandyard.envs.openenv.held import CLOSE, CREATE, HeldSessions
from sandyard.envs.openenv.protocol import ErrorCode, Message, Request, dump
from sandyard.envs.openenv.session import RPC_SERVER, Session, rpc_error

_BODY_LIMIT = 4 << 20
_AT_ONCE = 8  # envs of stateless calls, per worker
_STATUS = {ErrorCode.VALIDATION_ERROR: 422, ErrorCode.EXECUTION_ERROR: 500}
_STATE = {
    "type": "object",
    "properties": {
        "episode_id": {"type": ["string", "null"]},
        "step_count": {"type": "integer", "minimum": 0},
        "done": {"type": "boolean"},
    },
}
_OBSERVATION = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "stdout": {"type": "string"},
        "stderr": {"type": "string"},
        "exit_code": {"type": "integer"},
        "metadata": {"type": "object"},
    },
}


class HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpSide:
    """One request a connection: the parent counts sessions by sockets, and must see every socket."""

    def __init__(self, spec: EnvSpec, step_timeout: float, held: HeldSessions) -> None:
        self._spec = spec
        self._held = held
        self._step_timeout = step_timeout
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def serve(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            status, body = await self._route(scope["method"], scope["path"], receive)
        except HttpError as error:
            status, body = error.status, {"detail": str(error)}
        content = dump(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _route(self, method: str, path: str, receive: Receive) -> tuple[int, Message]:
        reads = {"/health": _health, "/metadata": self._metadata, "/schema": self._schema, "/state": _state}
        if path in reads:
            if method != "GET":
                raise HttpError(405, f"{path} takes GET")
            return 200, reads[path]()
        if path not in ("/reset", "/step", "/mcp"):
            raise HttpError(404, f"there is no {path}; sessions are at /ws")
        if method != "POST":
            raise HttpError(405, f"{path} takes POST")
        body = await _read_json(receive)
        if path == "/mcp":
            answer = await self._rpc_of_session(body)
            if answer is not None:
                return 200, answer
        if self._room.locked():
            raise HttpError(503, f"{_AT_ONCE} stateless calls are running; use a session at /ws, or try again")
        async with self._room:
            return await self._call(path, body)

    async def _call(self, path: str, body: Mapping[str, Any]) -> tuple[int, Message]:
        session = Session(self._spec.make(), step_timeout=self._step_timeout)
        try:
            if path == "/mcp":
                return 200, await self._rpc(session, body)
            if path == "/reset":
                return _http_answer(await session.answer(Request("reset", body)))
            return _http_answer(await self._step(session, body))
        finally:
            await session.close()

    async def _step(self, session: Session, body: Mapping[str, Any]) -> Message:
        action, limit = body.get("action"), body.get("timeout_s")
        if not isinstance(action, dict):
            raise HttpError(422, "action must be an object")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
            raise HttpError(422, "timeout_s must be a positive number")
        try:
            async with asyncio.timeout(limit):
                started = await session.answer(Request("reset", {}))
                return started if started["type"] == "error" else await session.answer(Request("step", action))
        except TimeoutError as error:
            raise HttpError(504, f"the step took longer than {limit:g} s") from error

    async def _rpc(self, session: Session, body: Mapping[str, Any]) -> Message:
        if body.get("method") == "tools/call":
            started = await session.answer(Request("reset", {}))
            if started["type"] == "error":
                raise HttpError(500, started["data"]["message"])
        return await session.answer_rpc(body)

    async def _rpc_of_session(self, body: Mapping[str, Any]) -> Message | None:
        """The answer to a call of a session that is kept over HTTP, or None for a call without one."""
        if body.get("method") == CREATE:
            try:
                return self._held.create(body.get("id"))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign env's constructor; the client is told
                text = f"env {self._spec.name} could not be made: {error}"
                return rpc_error(body.get("id"), RPC_SERVER, text, data={"factory_name": self._spec.name})
        params = body.get("params")
        if not isinstance(params, dict) or ("session_id" not in params and body.get("method") != CLOSE):
            return None
        return await self._held.answer(params.get("session_id"), body)

    def _metadata(self) -> Message:
        env = self._spec.make()
        tools = ", ".join(spec.name for spec in env.tools())
        description = (type(env).__doc__ or "").strip().split("\n")[0]
        return {
            "name": self._spec.name,
            "description": f"{description} Tools: {tools}.",
            "readme_content": None,
            "version": _version(),
            "author": "Sandyard",
            "documentation_url": None,
        }

    def _schema(self) -> Message:
        return {"action": action_schema(self._spec.make().tools()), "observation": _OBSERVATION, "state": _STATE}


def _health() -> Message:
    return {"status": "healthy"}


def _state() -> Message:
    return {"episode_id": None, "step_count": 0, "done": False}


def _http_answer(message: Message) -> tuple[int, Message]:
    data = message["data"]
    if message["type"] == "error":
        return _STATUS.get(data["code"], 400), {"detail": data["message"], **data}
    return 200, data


async def _read_json(receive: Receive) -> dict[str, Any]:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise HttpError(400, "the request ended early")
        body += event.get("body", b"")
        if len(body) > _BODY_LIMIT:
            raise HttpError(413, f"a body has at most {_BODY_LIMIT} bytes")
        if not event.get("more_body", False):
            break
    try:
        parsed = json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError) as error:
        raise HttpError(422, f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise HttpError(422, f"a JSON object is expected, not {type(parsed).__name__}")
    return parsed


def _version() -> str:
    try:
        return version("sandyard")
    except PackageNotFoundError:
        return "0"
