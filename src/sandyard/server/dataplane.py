"""Requests to a sandbox: found by header or host, checked, sent to its envd or to a port inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

import structlog
from starlette.types import Receive, Scope, Send

from sandyard.config import bare_domain
from sandyard.errors import AgentLinkError, NotFound, SandboxDied, SandyardError
from sandyard.sandboxes import Sandbox, SandboxManager
from sandyard.server.envd.call import Aborted, Call, Guest
from sandyard.server.envd.memory import MemoryWatch
from sandyard.server.envd.router import EnvdRouter
from sandyard.server.envd.sessions import Sessions
from sandyard.server.envd.signing import BadSignature, verify
from sandyard.server.envd.watchers import Watchers
from sandyard.server.ingress import TOKEN_HEADER, Ingress
from sandyard.server.ports import NO_RETRY, proxy_http, proxy_websocket, refuse_websocket
from sandyard.server.protocol import reset
from sandyard.server.tokens import SandboxTokens
from sandyard.server.usage import UsageHistory
from sandyard.server.web import ClientGone, Headers, decimal, headers_of, respond_error

log = structlog.get_logger("sandyard.dataplane")

ENVD_PORT = 49983
GONE = "The sandbox was not found"
_HOST = rb"(\d{1,5})-([a-z0-9]+)\.%b(?::\d{1,5})?"


class DataPlane:
    def __init__(self, manager: SandboxManager, tokens: SandboxTokens, usage: UsageHistory, domain: str | None) -> None:
        self._manager = manager
        self._tokens = tokens
        self._envd = EnvdRouter(usage)
        self._guests: dict[str, Guest] = {}
        bare = bare_domain(domain).encode() if domain else b""
        self._host = re.compile(_HOST % re.escape(bare)) if domain else None
        self._api_host = re.compile(rb"api\.%b(?::\d{1,5})?" % re.escape(bare)) if domain else None
        manager.on_death.append(self._died)

    def route(self, scope: Scope) -> tuple[str, int | None] | None:
        """(sandbox id, port) of a request to a sandbox; None for the control plane. A port that is
        no number is None."""
        sandbox_id = port = host = None
        for name, value in scope["headers"]:
            if name == b"e2b-sandbox-id":
                sandbox_id = value
            elif name == b"e2b-sandbox-port":
                port = value
            elif name == b"host":
                host = value
        if self._host is not None and self._api_host is not None and host is not None:
            if self._api_host.fullmatch(host := host.lower()):
                return None
            if match := self._host.fullmatch(host):
                port, sandbox_id = match.groups()
        if sandbox_id is None:
            return self._signed(scope)
        if port is None:
            return sandbox_id.decode("latin-1"), ENVD_PORT
        number = decimal(port)
        return sandbox_id.decode("latin-1"), number if number is not None and 0 < number < 65536 else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send, sandbox_id: str, port: int | None) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send, sandbox_id, port)
            return
        if port is None:
            await respond_error(send, 400, "header E2b-Sandbox-Port is not a port number")
            return
        try:
            sandbox = self._manager.find(sandbox_id)
        except SandboxDied as death:
            await _gone(send, sandbox_id, death)
            return
        except NotFound:
            await _gone(send, sandbox_id, None)
            return
        sandbox.touch()
        sandbox.streams += 1
        try:
            await self._serve(scope, receive, send, sandbox, port)
        finally:
            sandbox.streams -= 1
            sandbox.touch()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, sandbox: Sandbox, port: int) -> None:
        headers = headers_of(scope)
        call = Call(scope, receive, send, headers, self._guest(sandbox))
        try:
            if port != ENVD_PORT:
                await self._to_port(call, port)
            elif (refusal := self._refused(sandbox, scope, headers)) is not None:
                await respond_error(send, 401, refusal)
            else:
                await self._envd(call)
        except Aborted:
            log.info("response broken off", sandbox=sandbox.id, path=scope["path"])
            reset(scope)
        except ClientGone:
            log.debug("client went away", sandbox=sandbox.id, path=scope["path"])
        except AgentLinkError as error:
            await self._link_lost(call, error)
        except Exception as error:  # a bug: told in the form every client parses, and logged
            log.error("internal error", sandbox=sandbox.id, path=scope["path"], exc_info=error)
            if call.started:
                reset(scope)
                return
            await respond_error(send, 500, "internal error", [NO_RETRY])

    async def _to_port(self, call: Call, port: int) -> None:
        ingress = Ingress.of(call.sandbox.network)
        if (refusal := self._private(call.sandbox, ingress, call.headers)) is not None:
            await respond_error(call.send, 403, refusal, sandboxId=call.sandbox.id)
        else:
            await proxy_http(call, port, ingress)

    def _private(self, sandbox: Sandbox, ingress: Ingress, headers: Headers) -> str | None:
        """Why a request to a port may not pass; None if it may."""
        if ingress.public:
            return None
        token = headers.get(TOKEN_HEADER)
        if token is None:
            return "the sandbox's ports are private: header e2b-traffic-access-token is missing"
        return None if self._tokens.traffic_fits(sandbox.id, token) else "wrong e2b-traffic-access-token"

    async def _link_lost(self, call: Call, error: SandyardError) -> None:
        """Before the response: say how the sandbox died. Within it: break the connection off."""
        lost = await call.guest.lost(error)
        if call.started:
            reset(call.scope)
            return
        if lost:
            await _gone(call.send, call.sandbox.id, call.sandbox.death)
        else:
            await respond_error(call.send, 502, str(error), sandboxId=call.sandbox.id)

    def _refused(self, sandbox: Sandbox, scope: Scope, headers: Headers) -> str | None:
        """Why a request to envd may not pass; None if it may."""
        path = scope["path"]
        if not sandbox.secured or path == "/health" or scope["method"] == "OPTIONS":
            return None
        token = headers.get(b"x-access-token")
        if token is not None:
            return None if self._tokens.fits(sandbox.id, token) else "wrong X-Access-Token"
        if path != "/files":
            return "missing X-Access-Token"
        try:
            verify(_query(scope), "read" if scope["method"] == "GET" else "write", self._tokens.of(sandbox.id))
        except BadSignature as error:
            return str(error)
        return None

    def _signed(self, scope: Scope) -> tuple[str, int] | None:
        """A signed URL through a plain base URL names no sandbox: the signature tells which it is."""
        if scope["type"] != "http" or scope["path"] != "/files" or b"signature=" not in scope.get("query_string", b""):
            return None
        query = _query(scope)
        for sandbox in self._manager.all():
            try:
                verify(query, "read" if scope["method"] == "GET" else "write", self._tokens.of(sandbox.id))
            except BadSignature as error:
                if "expired" not in str(error):
                    continue
            return sandbox.id, ENVD_PORT
        return None

    def _guest(self, sandbox: Sandbox) -> Guest:
        guest = self._guests.get(sandbox.id)
        if guest is None:
            guest = self._guests[sandbox.id] = Guest(
                sandbox, Sessions(MemoryWatch(sandbox)), Watchers(), self._manager.relink
            )
        return guest

    def _died(self, sandbox: Sandbox, _death: SandboxDied) -> None:
        guest = self._guests.pop(sandbox.id, None)
        if guest is not None:
            guest.die()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send, sandbox_id: str, port: int | None) -> None:
        await receive()  # websocket.connect
        try:
            sandbox = self._manager.find(sandbox_id)
        except (SandboxDied, NotFound):
            await refuse_websocket(send, 502, GONE, [NO_RETRY], sandboxId=sandbox_id)
            return
        ingress = Ingress.of(sandbox.network)
        if (refusal := self._private(sandbox, ingress, headers_of(scope))) is not None:
            await refuse_websocket(send, 403, refusal, sandboxId=sandbox_id)
            return
        if port is None or port == ENVD_PORT:
            await refuse_websocket(send, 400, "no port that a WebSocket could go to", sandboxId=sandbox_id)
            return
        sandbox.touch()
        sandbox.streams += 1
        try:
            await proxy_websocket(scope, receive, send, sandbox, port, ingress)
        finally:
            sandbox.streams -= 1
            sandbox.touch()


async def _gone(send: Send, sandbox_id: str, death: SandboxDied | None) -> None:
    headers, extra = [NO_RETRY], {"sandboxId": sandbox_id}
    if death is not None:
        headers.append((b"x-sandyard-death", death.reason.value.encode()))
        extra |= {"reason": death.reason.value, "detail": death.detail}
    await respond_error(send, 502, GONE, headers, **extra)


def _query(scope: Scope) -> Mapping[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
