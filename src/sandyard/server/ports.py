"""Requests to a port inside a sandbox, through the agent: a sandbox needs no network for them."""

from __future__ import annotations

from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import PortStream
from sandyard.network.http_proxy import BadResponse, BrokenResponse, exchange
from sandyard.network.websocket_proxy import BAD_GATEWAY, relay
from sandyard.sandboxes import Sandbox
from sandyard.server.envd.call import Aborted, Call
from sandyard.server.web import respond_error

NO_RETRY = (b"should-retry", b"false")


async def proxy_http(call: Call, port: int) -> None:
    """Answer by what listens on `port`. Raises `AgentLinkError` and `Aborted`."""
    stream = await _connect(call, port)
    if stream is None:
        return

    async def send(message: ASGIMessage) -> None:
        call.started = True
        await call.send(message)

    try:
        await exchange(call.scope, call.receive, send, stream)
    except BrokenResponse as error:
        raise Aborted from error
    except BadResponse as error:
        message = f"port {port} did not answer with HTTP: {error}"
        await respond_error(call.send, 502, message, [NO_RETRY], sandboxId=call.sandbox.id, port=port)
    except AgentLinkError as error:
        if call.started:
            raise Aborted from error
        raise
    finally:
        await stream.close()


async def proxy_websocket(scope: Scope, receive: Receive, send: Send, sandbox: Sandbox, port: int) -> None:
    """Relay a WebSocket to `port`; where nothing accepts it, it closes with 1014 (bad gateway)."""
    await receive()  # websocket.connect
    try:
        stream = await sandbox.agent.connect_port(port)
    except (GuestError, AgentLinkError) as error:
        await send({"type": "websocket.close", "code": BAD_GATEWAY, "reason": str(error)[:120]})
        return
    try:
        await relay(scope, receive, send, stream)
    finally:
        await stream.close()


async def _connect(call: Call, port: int) -> PortStream | None:
    try:
        return await call.sandbox.agent.connect_port(port)
    except GuestError as error:
        message = "The sandbox is running but port is not open"
        if error.code is not GuestErrorCode.REFUSED:
            message = f"port {port} cannot be reached: {error}"
        await respond_error(call.send, 502, message, [NO_RETRY], sandboxId=call.sandbox.id, port=port)
        return None
