"""`/proxy`: AgentENV's way to a port of a sandbox, by headers.

`x-agentenv-sandbox-id` and `x-agentenv-target-port` (or `e2b-sandbox-id` and `e2b-sandbox-port`) name
sandbox and port. They and the `/proxy` in front of the path are taken off, `x-forwarded-method` and
`x-forwarded-uri` tell what was asked for, and the data plane does the rest. A host name that leads to a
sandbox wins: `/proxy` is then a path of what listens there.

| answer | |
|---|---|
| 400 | a header is missing or is no port |
| 401 | port of envd, and not the sandbox's token; also for `/health` |
| 404 | no such sandbox |
| 410 | it is paused and does not resume by itself |
| 502 | nothing listens on the port, or the sandbox died |
| 504 | no answer began within `ANSWER_SECONDS` of the request's end |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Message, Receive, Scope, Send

from sandyard.errors import NotFound, SandboxDied
from sandyard.sandboxes import SandboxManager
from sandyard.server.dataplane import ENVD_PORT, DataPlane
from sandyard.server.ports import NO_RETRY, refuse_websocket
from sandyard.server.tokens import SandboxTokens
from sandyard.server.web import decimal, headers_of, respond_error

PREFIX = b"/proxy"
ANSWER_SECONDS = 300.0
_ID, _PORT = (b"x-agentenv-sandbox-id", b"e2b-sandbox-id"), (b"x-agentenv-target-port", b"e2b-sandbox-port")
_ROUTING = {*_ID, *_PORT}
_OURS = {b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-method", b"x-forwarded-uri"}
Pairs = Sequence[tuple[bytes, bytes]]


class _Refused(Exception):
    """`status` and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class AgentEnvProxy:
    def __init__(self, manager: SandboxManager, tokens: SandboxTokens, data: DataPlane) -> None:
        self._manager = manager
        self._tokens = tokens
        self._data = data

    def takes(self, scope: Scope) -> bool:
        """Whether this is a request for `/proxy` that no host name leads elsewhere."""
        raw: bytes = scope.get("raw_path", b"")
        if raw != PREFIX and not raw.startswith(PREFIX + b"/"):
            return False
        return self._data.route({**scope, "headers": _without(scope["headers"], _ROUTING)}) is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            sandbox_id, port = self._target(scope)
        except _Refused as refusal:
            await _refuse(scope, send, refusal)
            return
        inner = _inner(scope)
        if scope["type"] == "websocket":
            await self._data(inner, receive, send, sandbox_id, port)
        else:
            await _in_time(self._data, inner, receive, send, sandbox_id, port)

    def _target(self, scope: Scope) -> tuple[str, int]:
        headers = headers_of(scope)
        sandbox_id, number = _first(headers, _ID), decimal(_first(headers, _PORT))
        if not sandbox_id:
            raise _Refused(400, "header x-agentenv-sandbox-id is missing")
        if number is None or not 0 < number < 65536:
            raise _Refused(400, "header x-agentenv-target-port is missing or no port number")
        name = sandbox_id.decode("latin-1")
        try:
            sandbox = self._manager.look(name)
        except (NotFound, SandboxDied) as error:
            raise _Refused(404, str(error)) from error
        if sandbox.is_paused and not sandbox.policy.auto_resume:
            raise _Refused(410, f"sandbox '{name}' is paused")
        token = headers.get(b"x-access-token", b"")
        path = scope["path"][len(PREFIX) :]
        if number == ENVD_PORT and path == "/health" and sandbox.secured and not self._tokens.fits(name, token):
            raise _Refused(401, "wrong X-Access-Token" if token else "missing X-Access-Token")
        return name, number


def _inner(scope: Scope) -> Scope:
    """The request as what listens on the port gets it."""
    raw: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    headers = _without(scope["headers"], _ROUTING | _OURS)
    method: str = scope.get("method", "GET")
    headers += [(b"x-forwarded-method", method.encode()), (b"x-forwarded-uri", raw + (b"?" + query if query else b""))]
    return {
        **scope,
        "path": scope["path"][len(PREFIX) :] or "/",
        "raw_path": raw[len(PREFIX) :] or b"/",
        "headers": headers,
    }


async def _in_time(data: DataPlane, scope: Scope, receive: Receive, send: Send, sandbox_id: str, port: int) -> None:
    """Answer 504 where no answer begins in time."""
    loop = asyncio.get_running_loop()
    started = False
    try:
        async with asyncio.timeout(None) as limit:

            async def counted_receive() -> Message:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body", False) and not started:
                    limit.reschedule(loop.time() + ANSWER_SECONDS)
                return message

            async def counted_send(message: Message) -> None:
                nonlocal started
                if not started:
                    started = True
                    limit.reschedule(None)
                await send(message)

            await data(scope, counted_receive, counted_send, sandbox_id, port)
    except TimeoutError:
        if started:
            raise
        message = f"port {port} of sandbox {sandbox_id} did not answer within {ANSWER_SECONDS:g} s"
        await respond_error(send, 504, message, [NO_RETRY], sandboxId=sandbox_id, port=port)


async def _refuse(scope: Scope, send: Send, refusal: _Refused) -> None:
    if scope["type"] == "websocket":
        await refuse_websocket(send, refusal.status, str(refusal), [NO_RETRY])
    else:
        await respond_error(send, refusal.status, str(refusal), [NO_RETRY])


def _first(headers: dict[bytes, bytes], names: Sequence[bytes]) -> bytes | None:
    return next((headers[name] for name in names if name in headers), None)


def _without(headers: Pairs, names: set[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in names]
