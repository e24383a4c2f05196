"""What every endpoint of the control plane works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from sandyard.sandboxes import SandboxManager
from sandyard.server.auth import Keys
from sandyard.server.builds import Builds
from sandyard.server.builds.tickets import Tickets
from sandyard.server.control.hooks import Hooks
from sandyard.server.control.idempotency import Idempotency
from sandyard.server.load import LoadHistory
from sandyard.server.metrics import Metrics
from sandyard.server.storekeeper import StoreKeeper
from sandyard.server.tokens import SandboxTokens
from sandyard.server.usage import UsageHistory


@dataclass(frozen=True, slots=True)
class Context:
    manager: SandboxManager
    keys: Keys
    tokens: SandboxTokens
    usage: UsageHistory
    metrics: Metrics
    idempotency: Idempotency
    load: LoadHistory
    builds: Builds
    tickets: Tickets
    keeper: StoreKeeper
    hooks: Hooks | None


async def context(request: Request) -> Context:
    # async, though it awaits nothing: FastAPI sends plain functions to a thread.
    return cast(Context, request.app.state.context)


async def tenant(request: Request, here: Annotated[Context, Depends(context)]) -> str:
    return await here.keys.tenant(request.scope)


Here = Annotated[Context, Depends(context)]
Tenant = Annotated[str, Depends(tenant)]
