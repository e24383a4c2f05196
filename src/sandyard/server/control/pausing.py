"""Pause, resume, connect: the moves of a sandbox between running and paused, as E2B's API has them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import APIRouter, Response

from sandyard.errors import Conflict, SandyardError
from sandyard.sandboxes import Sandbox
from sandyard.sandboxes.model import OnTimeout
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.failures import NEVER_AGAIN, answer
from sandyard.server.control.models import (
    ConnectSandbox,
    ErrorBody,
    PauseSandbox,
    Refresh,
    ResumeSandbox,
    SandboxView,
    SetTimeout,
)
from sandyard.server.control.sandboxes import view_of

HEALTHY_SECONDS = 2.0
UNRESPONSIVE = "sandbox_snapshot_guest_agent_unresponsive"

router = APIRouter(tags=["sandboxes"])


@router.post("/sandboxes/{sandbox_id}/pause", status_code=204, responses={503: {"model": ErrorBody}})
async def pause(sandbox_id: str, here: Here, tenant: Tenant, body: PauseSandbox | None = None) -> Response:
    """Pause a sandbox: with its processes and memory, or (`memory: false`) with its files only. 409: it is paused."""
    sandbox = here.manager.get(tenant, sandbox_id)
    wanted = body or PauseSandbox()
    here.manager.pausing.check(memory=wanted.memory)
    if wanted.requireHealthyGuest and not sandbox.is_paused and not await _answers(sandbox):
        return answer(503, f"sandbox '{sandbox_id}' does not answer, and keeps running", UNRESPONSIVE, NEVER_AGAIN)
    await here.manager.pausing.pause(sandbox, memory=wanted.memory)
    return Response(status_code=204)


@router.post("/sandboxes/{sandbox_id}/connect", responses={201: {"model": SandboxView}})
@router.post("/v2/sandboxes/{sandbox_id}/connect", responses={201: {"model": SandboxView}})
async def connect(
    sandbox_id: str, here: Here, tenant: Tenant, response: Response, body: ConnectSandbox | None = None
) -> SandboxView:
    """Find a sandbox and let it live at least `timeout` seconds from now. 201: it was paused, and was resumed."""
    sandbox = here.manager.get(tenant, sandbox_id)
    wanted = body or ConnectSandbox()
    seconds = _seconds(here, wanted.timeout)
    if await here.manager.pausing.resume(sandbox, seconds, memory=wanted.memory):
        response.status_code = 201
    else:
        await here.manager.set_timeout(sandbox, seconds, only_extend=True)
    return view_of(here, sandbox)


@router.post("/sandboxes/{sandbox_id}/resume", status_code=201, deprecated=True)
async def resume(sandbox_id: str, here: Here, tenant: Tenant, body: ResumeSandbox | None = None) -> SandboxView:
    """Resume a paused sandbox. 409: it runs."""
    sandbox = here.manager.get(tenant, sandbox_id)
    wanted = body or ResumeSandbox()
    if not await here.manager.pausing.resume(sandbox, _seconds(here, wanted.timeout), memory=wanted.memory):
        raise Conflict(f"sandbox '{sandbox_id}' is already running")
    if wanted.autoPause is not None:
        on_timeout = OnTimeout.PAUSE if wanted.autoPause else OnTimeout.KILL
        await here.manager.set_policy(sandbox, replace(sandbox.policy, on_timeout=on_timeout))
    return view_of(here, sandbox)


@router.post("/sandboxes/{sandbox_id}/timeout", status_code=204)
async def set_timeout(sandbox_id: str, body: SetTimeout, here: Here, tenant: Tenant) -> None:
    """Set the lifetime from now on; 0 or less ends it now: the sandbox is killed, or paused if it was made so."""
    await here.manager.set_timeout(here.manager.get(tenant, sandbox_id), body.timeout)


@router.post("/sandboxes/{sandbox_id}/refreshes", status_code=204)
async def refresh(sandbox_id: str, here: Here, tenant: Tenant, body: Refresh | None = None) -> None:
    """Let the sandbox live at least `duration` seconds from now (default: the default lifetime)."""
    sandbox = here.manager.get(tenant, sandbox_id)
    await here.manager.set_timeout(sandbox, _seconds(here, body.duration if body else None), only_extend=True)


def _seconds(here: Context, asked: int | None) -> float:
    return here.manager.settings.sandbox.timeout if asked is None else float(asked)


async def _answers(sandbox: Sandbox) -> bool:
    try:
        async with asyncio.timeout(HEALTHY_SECONDS):
            await sandbox.agent.hello()
    except (SandyardError, TimeoutError):
        return False
    return True
