"""The ASGI application: requests to a sandbox go to the data plane, all others to the control plane."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, HTTPException
from starlette.types import Message, Receive, Scope, Send

from sandyard.sandboxes import SandboxManager
from sandyard.server.auth import Keys
from sandyard.server.control import failures, health, leases, logs, nodes, openapi, sandboxes, teams, templates
from sandyard.server.control.context import Context
from sandyard.server.control.idempotency import Idempotency
from sandyard.server.dataplane import DataPlane
from sandyard.server.load import LoadHistory
from sandyard.server.metrics import Metrics
from sandyard.server.tokens import SandboxTokens
from sandyard.server.usage import UsageHistory

BODY_LIMIT = 1 << 20
ROUTERS = [module.router for module in (sandboxes, templates, leases, logs, teams, nodes, health)]


class Application:
    """One server's ASGI application over a started manager. Holds no resources of its own."""

    def __init__(self, manager: SandboxManager, keys: Keys, tokens: SandboxTokens) -> None:
        self.manager = manager
        self.keys = keys
        self.usage = UsageHistory(manager)
        self.control = control_plane(
            Context(manager, keys, tokens, self.usage, Metrics(manager), Idempotency(), LoadHistory(manager))
        )
        self.data = DataPlane(manager, tokens, self.usage, manager.settings.server.domain)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (target := self.data.route(scope)) is not None:
            await self.data(scope, receive, send, *target)
        else:
            await self.control(scope, bounded(receive, BODY_LIMIT), send)


def bounded(receive: Receive, limit: int) -> Receive:
    """`receive` that gives up on a body of more than `limit` bytes: it is read before the key is looked at."""
    left = limit

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"the body passes {limit} bytes")
        return message

    return counted


def control_plane(context: Context) -> FastAPI:
    # No /docs: its page would load its scripts from elsewhere. No redirects: their target would be the Host header's.
    app = FastAPI(
        title="Sandyard",
        version=version("sandyard"),
        summary="Sandboxes for agentic reinforcement learning, E2B-compatible.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    failures.install(app, [route for router in ROUTERS for route in router.routes] + app.routes)
    app.openapi = openapi.description(app)  # type: ignore[method-assign] # the way FastAPI offers
    return app
