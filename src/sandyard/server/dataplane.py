"""Requests to a sandbox: found by header or host, checked, sent to its envd or to a port inside it."""

from __future__ import annotations

import math
import re

import structlog
from starlette.types import Receive, Scope, Send

from sandyard.config import bare_domain
from sandyard.errors import AgentLinkError, CapacityError, NotFound, SandboxDied, SandyardError
from sandyard.sandboxes import Sandbox, SandboxManager
from sandyard.sandboxes.halted import HaltedInstance
from sandyard.server.envd.call import Aborted, Call, Guest
from sandyard.server.envd.memory import MemoryWatch
from sandyard.server.envd.router import EnvdRouter
from sandyard.server.envd.sessions import Sessions
from sandyard.server.envd.watchers import Watchers
from sandyard.server.gate import ENVD_PORT, Gate
from sandyard.server.ingress import Ingress
from sandyard.server.ports import NO_RETRY, proxy_http, proxy_websocket, refuse_websocket
from sandyard.server.protocol import reset
from sandyard.server.tokens import SandboxTokens
from sandyard.server.usage import UsageHistory
from sandyard.server.web import ClientGone, HeaderList, decimal, headers_of, respond_error

log = structlog.get_logger("sandyard.dataplane")

GONE = "The sandbox was not found"
_HOST = rb"(\d{1,5})-([a-z0-9]+)\.%b(?::\d{1,5})?"
_API_HOST = rb"api\.%b(?::\d{1,5})?"

__all__ = ["ENVD_PORT", "DataPlane"]


class DataPlane:
    def __init__(self, manager: SandboxManager, tokens: SandboxTokens, usage: UsageHistory, domain: str | None) -> None:
        self._manager = manager
        self._gate = Gate(manager, tokens)
        self._envd = EnvdRouter(usage)
        self._guests: dict[str, Guest] = {}
        bare = re.escape(bare_domain(domain).encode()) if domain else None
        self._hosts = (re.compile(_API_HOST % bare), re.compile(_HOST % bare)) if bare else None
        manager.on_death.append(self._died)
        manager.on_pause.append(self._paused)

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
        if self._hosts is not None and host is not None:
            api, sandbox = self._hosts
            if api.fullmatch(host := host.lower()):
                return None
            if match := sandbox.fullmatch(host):
                port, sandbox_id = match.groups()
        if sandbox_id is None:
            signed = self._gate.signed(scope)
            return (signed, ENVD_PORT) if signed is not None else None
        if port is None:
            return sandbox_id.decode("latin-1"), ENVD_PORT
        number = decimal(port)
        return sandbox_id.decode("latin-1"), number if number is not None and 0 < number < 65536 else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send, sandbox_id: str, port: int | None) -> None:
        websocket = scope["type"] == "websocket"
        refuse = refuse_websocket if websocket else respond_error
        if websocket:
            await receive()  # websocket.connect
        if port is None or (websocket and port == ENVD_PORT):
            reason = "envd has no WebSocket" if port else "header E2b-Sandbox-Port is not a port number"
            await refuse(send, 400, reason, sandboxId=sandbox_id)
            return
        headers = headers_of(scope)
        try:
            sandbox = await self._gate.reach(sandbox_id, port, scope, headers)
        except (SandyardError, TimeoutError) as error:
            status, message, fields, extra = _unreachable(error)
            await refuse(send, status, message, fields, sandboxId=sandbox_id, **extra)
            return
        if (refusal := self._gate.refusal(sandbox, port, scope, headers)) is not None:
            status, message = refusal
            extra = {} if port == ENVD_PORT else {"sandboxId": sandbox_id}
            await refuse(send, status, message, (), **extra)
            return
        sandbox.touch()
        sandbox.streams += 1
        try:
            if websocket:
                await proxy_websocket(scope, receive, send, sandbox, port, Ingress.of(sandbox.network))
            else:
                await self._serve(Call(scope, receive, send, headers, self._guest(sandbox)), port)
        finally:
            sandbox.streams -= 1
            sandbox.touch()

    async def _serve(self, call: Call, port: int) -> None:
        path = call.scope["path"]
        try:
            if port == ENVD_PORT:
                await self._envd(call)
            else:
                await proxy_http(call, port, Ingress.of(call.sandbox.network))
        except Aborted:
            log.info("response broken off", sandbox=call.sandbox.id, path=path)
            reset(call.scope)
        except ClientGone:
            log.debug("client went away", sandbox=call.sandbox.id, path=path)
        except AgentLinkError as error:
            await self._link_lost(call, error)
        except Exception as error:  # a bug: told in the form every client parses, and logged
            log.error("internal error", sandbox=call.sandbox.id, path=path, exc_info=error)
            if call.started:
                reset(call.scope)
                return
            await respond_error(call.send, 500, "internal error", [NO_RETRY])

    async def _link_lost(self, call: Call, error: SandyardError) -> None:
        """Before the response: say how the sandbox died. Within it: break the connection off."""
        lost = await call.guest.lost(error)
        if call.started:
            reset(call.scope)
        elif lost:
            status, message, fields, extra = _unreachable(call.sandbox.death or NotFound(GONE))
            await respond_error(call.send, status, message, fields, sandboxId=call.sandbox.id, **extra)
        else:
            await respond_error(call.send, 502, str(error), sandboxId=call.sandbox.id)

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

    def _paused(self, sandbox: Sandbox) -> None:
        """Where it only stands still it keeps all that hangs on its processes. Of one that has none, or whose link
        is gone, nothing of that is left: whoever asks for a process later is attached to it anew."""
        halted = isinstance(sandbox.instance, HaltedInstance)
        if halted and (guest := self._guests.pop(sandbox.id, None)) is not None:
            guest.die()


def _unreachable(error: SandyardError | TimeoutError) -> tuple[int, str, HeaderList, dict[str, str]]:
    """Status, message, headers and more of the body: why there is no sandbox to send a request to."""
    if isinstance(error, SandboxDied):
        death = error.reason.value
        headers = [NO_RETRY, (b"x-sandyard-death", death.encode())]
        return 502, GONE, headers, {"reason": death, "detail": error.detail}
    if isinstance(error, NotFound):  # one that stays paused, too: that is how clients know that it does not run
        return 502, GONE, [NO_RETRY], {}
    if isinstance(error, TimeoutError):
        return 504, "The sandbox is still being resumed", [], {}
    if isinstance(error, CapacityError):
        wait = str(math.ceil(error.retry_after)).encode()
        return 429, f"The sandbox cannot be resumed now: {error}", [(b"retry-after", wait)], {}
    return 503, f"The sandbox cannot be resumed: {error}", [NO_RETRY], {}
