"""Which requests to a sandbox may pass, and which wake one that is paused."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.types import Scope

from sandyard.errors import NotFound
from sandyard.sandboxes import Sandbox, SandboxManager, State
from sandyard.server.envd.signing import BadSignature, Operation, verify
from sandyard.server.ingress import TOKEN_HEADER, Ingress
from sandyard.server.tokens import SandboxTokens
from sandyard.server.web import Headers

ENVD_PORT = 49983


class Gate:
    def __init__(self, manager: SandboxManager, tokens: SandboxTokens) -> None:
        self._manager = manager
        self._tokens = tokens

    async def reach(self, sandbox_id: str, port: int, scope: Scope, headers: Headers) -> Sandbox:
        """The sandbox, running. One that is paused is only woken by a request that may pass.

        Raises `NotFound` (also for one that stays paused), `SandboxDied`, `TimeoutError`, and what
        kept a paused one from going on."""
        sandbox = self._manager.look(sandbox_id)
        if sandbox.state is State.RUNNING:
            return sandbox
        if self.refusal(sandbox, port, scope, headers) is not None or self._asks_health(sandbox, port, scope, headers):
            raise NotFound(f"sandbox '{sandbox_id}' is paused")
        return await self._manager.reach(sandbox_id)

    def _asks_health(self, sandbox: Sandbox, port: int, scope: Scope, headers: Headers) -> bool:
        """Anybody may ask whether it runs; that alone wakes nothing."""
        token = headers.get(b"x-access-token", b"")
        asks = port == ENVD_PORT and scope["path"] == "/health" and sandbox.secured
        return asks and not self._tokens.fits(sandbox.id, token)

    def refusal(self, sandbox: Sandbox, port: int, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and reason for a request that may not pass; None if it may."""
        if port == ENVD_PORT:
            reason = self._envd_refusal(sandbox, scope, headers)
            return (401, reason) if reason is not None else None
        reason = self._port_refusal(sandbox, headers)
        return (403, reason) if reason is not None else None

    def signed(self, scope: Scope) -> str | None:
        """A signed URL through a plain base URL names no sandbox: the signature tells which it is."""
        if scope["type"] != "http" or scope["path"] != "/files" or b"signature=" not in scope.get("query_string", b""):
            return None
        query = _query(scope)
        for sandbox in self._manager.everyone():
            try:
                verify(query, _operation(scope), self._tokens.of(sandbox.id))
            except BadSignature as error:
                if "expired" not in str(error):
                    continue
            return sandbox.id
        return None

    def _envd_refusal(self, sandbox: Sandbox, scope: Scope, headers: Headers) -> str | None:
        path = scope["path"]
        if not sandbox.secured or path == "/health" or scope.get("method") == "OPTIONS":
            return None
        token = headers.get(b"x-access-token")
        if token is not None:
            return None if self._tokens.fits(sandbox.id, token) else "wrong X-Access-Token"
        if path != "/files":
            return "missing X-Access-Token"
        try:
            verify(_query(scope), _operation(scope), self._tokens.of(sandbox.id))
        except BadSignature as error:
            return str(error)
        return None

    def _port_refusal(self, sandbox: Sandbox, headers: Headers) -> str | None:
        if Ingress.of(sandbox.network).public:
            return None
        token = headers.get(TOKEN_HEADER)
        if token is None:
            return "the sandbox's ports are private: header e2b-traffic-access-token is missing"
        return None if self._tokens.traffic_fits(sandbox.id, token) else "wrong e2b-traffic-access-token"


def _operation(scope: Scope) -> Operation:
    return "read" if scope["method"] == "GET" else "write"


def _query(scope: Scope) -> Mapping[str, str]:
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
