"""Requests to a port inside a sandbox, through the agent: a sandbox needs no network for them."""

from __future__ import annotations

import json

from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from sandyard.errors import AgentLinkError, GuestError, GuestErrorCode
from sandyard.guest.base import PortStream
from sandyard.network.http_proxy import BadResponse, BrokenResponse, ClientLeft, exchange
from sandyard.network.tls_stream import TlsStream
from sandyard.network.websocket_proxy import NotAccepted, relay
from sandyard.sandboxes import Sandbox
from sandyard.server.envd.call import Aborted, Call
from sandyard.server.ingress import Ingress
from sandyard.server.web import ClientGone, HeaderList, respond_error

NO_RETRY = (b"should-retry", b"false")


async def proxy_http(call: Call, port: int, ingress: Ingress) -> None:
    """Answer by what listens on `port`. Raises `AgentLinkError`, `Aborted` and `ClientGone`."""
    sandbox = call.sandbox
    try:
        stream = await _connect(sandbox, port, ingress)
    except GuestError as error:
        await respond_error(call.send, 502, _closed(port, error), [NO_RETRY], sandboxId=sandbox.id, port=port)
        return

    async def send(message: ASGIMessage) -> None:
        call.started = True
        await call.send(message)

    try:
        await exchange(call.scope, call.receive, send, stream, ingress.host(port))
    except ClientLeft as error:
        raise ClientGone from error
    except BrokenResponse as error:
        raise Aborted from error
    except BadResponse as error:
        message = f"port {port} did not answer with HTTP: {error}"
        await respond_error(call.send, 502, message, [NO_RETRY], sandboxId=sandbox.id, port=port)
    except AgentLinkError as error:
        if call.started:
            raise Aborted from error
        raise
    finally:
        await stream.close()


async def proxy_websocket(
    scope: Scope, receive: Receive, send: Send, sandbox: Sandbox, port: int, ingress: Ingress
) -> None:
    """Relay a WebSocket to `port`; where nothing accepts it, its handshake is answered as a request would be."""
    try:
        stream = await _connect(sandbox, port, ingress)
    except (GuestError, AgentLinkError) as error:
        await refuse_websocket(send, 502, _closed(port, error), [NO_RETRY], sandboxId=sandbox.id, port=port)
        return
    try:
        await relay(scope, receive, send, stream, ingress.host(port))
    except (NotAccepted, GuestError, AgentLinkError) as error:
        message = f"port {port} did not open a WebSocket{f': {error}' if str(error) else ''}"
        await refuse_websocket(send, 502, message, [NO_RETRY], sandboxId=sandbox.id, port=port)
    finally:
        await stream.close()


async def refuse_websocket(send: Send, status: int, message: str, headers: HeaderList = (), **extra: object) -> None:
    """Answer the handshake of a WebSocket with the error body every E2B client parses."""
    body = json.dumps({"code": status, "message": message, **extra}).encode()
    fields = [*headers, (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": status, "headers": fields})
    await send({"type": "websocket.http.response.body", "body": body})


async def _connect(sandbox: Sandbox, port: int, ingress: Ingress) -> PortStream:
    stream = await sandbox.agent.connect_port(port)
    if port not in ingress.https_ports:
        return stream
    try:
        inside = TlsStream(stream, "localhost")
        await inside.handshake()
    except BaseException:
        await stream.close()
        raise
    return inside


def _closed(port: int, error: GuestError | AgentLinkError) -> str:
    if isinstance(error, GuestError) and error.code is GuestErrorCode.REFUSED:
        return "The sandbox is running but port is not open"
    return f"port {port} cannot be reached: {error}"
