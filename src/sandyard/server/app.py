"""The ASGI application: requests to a sandbox go to the data plane, all others to the control plane."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import FastAPI, HTTPException
from starlette.types import Message, Receive, Scope, Send

from sandyard.sandboxes import SandboxManager
from sandyard.server.agentproxy import AgentEnvProxy
from sandyard.server.auth import Keys
from sandyard.server.builds import Builds
from sandyard.server.builds.tickets import Tickets
from sandyard.server.control import (
    agentenv,
    builds,
    failures,
    health,
    leases,
    logs,
    network,
    nodes,
    openapi,
    pausing,
    remote,
    sandboxes,
    snapshots,
    storage,
    teams,
    templates,
)
from sandyard.server.control.context import Context
from sandyard.server.control.hooks import Hooks
from sandyard.server.control.idempotency import Idempotency
from sandyard.server.dataplane import DataPlane
from sandyard.server.load import LoadHistory
from sandyard.server.metrics import Metrics
from sandyard.server.storekeeper import StoreKeeper
from sandyard.server.tokens import SandboxTokens
from sandyard.server.usage import UsageHistory

BODY_LIMIT = 1 << 20
BODY_SECONDS = 60.0
_CLOSE = {"connection": "close"}  # what is left of the body is not to be taken for a request
ROUTERS = [
    module.router
    for module in (
        sandboxes,
        network,
        pausing,
        snapshots,
        remote,
        builds,
        templates,
        leases,
        logs,
        teams,
        nodes,
        storage,
        agentenv,
        health,
    )
]


class Application:
    """One server's ASGI application over a started manager. Holds no resources of its own."""

    def __init__(self, manager: SandboxManager, keys: Keys, tokens: SandboxTokens, hooks: Hooks | None = None) -> None:
        self.manager = manager
        self.made_with: str | None = None  # as `Runtime.check` tells it
        self.keys = keys
        self.usage = UsageHistory(manager)
        self.builds = Builds(manager)
        self.keeper = StoreKeeper(manager)
        self.builds.bases.collect, self.builds.bases.settled = self.keeper.make_room, self.keeper.soon
        self.control = control_plane(
            Context(
                manager,
                keys,
                tokens,
                self.usage,
                Metrics(manager),
                Idempotency(),
                LoadHistory(manager),
                self.builds,
                Tickets(tokens),
                self.keeper,
                hooks,
            )
        )
        self.data = DataPlane(manager, tokens, self.usage, manager.settings.server.domain)
        self.proxy = AgentEnvProxy(manager, tokens, self.data)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.proxy.takes(scope):
            await self.proxy(scope, receive, send)
        elif scope["type"] in ("http", "websocket") and (target := self.data.route(scope)) is not None:
            await self.data(scope, receive, send, *target)
        else:
            # An upload is bounded by its endpoint, which looks at the permission before it reads.
            uploads = scope["type"] == "http" and scope["path"].startswith("/uploads/")
            await self.control(scope, receive if uploads else bounded(receive, BODY_LIMIT), send)


def bounded(receive: Receive, limit: int) -> Receive:
    """`receive` that gives up on a body of more than `limit` bytes, or one that does not come in `BODY_SECONDS`:
    it is read before the key is looked at."""
    left, complete = limit, False
    deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def counted() -> Message:
        nonlocal left, complete
        if complete:
            return await receive()  # waits for the client to go, which it need not do soon
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} s", _CLOSE) from error
        complete = not message.get("more_body", False)
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"the body passes {limit} bytes", _CLOSE)
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
