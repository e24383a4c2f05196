"""`/sandboxes`: E2B's REST API, both generations."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from sandyard.errors import BadRequest, DeathReason, SandboxDied, SandyardError, Unsupported
from sandyard.runtimes.base import Resources
from sandyard.sandboxes import CreateRequest, Sandbox
from sandyard.sandboxes.model import OnTimeout, TimeoutPolicy
from sandyard.server.control.context import Context, Here, Tenant
from sandyard.server.control.hooks import checked_params
from sandyard.server.control.listing import page, parse_metadata, parse_query
from sandyard.server.control.models import (
    Lifecycle,
    ListedSandbox,
    NewSandbox,
    SandboxDetail,
    SandboxMetric,
    SandboxView,
)
from sandyard.server.control.network import checked_network, internet_access, shown_network
from sandyard.server.ingress import Ingress

LEASE_KEY = "sandyard.lease"
IDLE_KEY = "sandyard.idle_timeout"

Key = Annotated[str | None, Header()]

router = APIRouter(tags=["sandboxes"])


@router.post("/sandboxes", status_code=201)
async def create(body: NewSandbox, here: Here, tenant: Tenant, idempotency_key: Key = None) -> SandboxView:
    """Start a sandbox. Without `secure` its envd needs no token."""
    return await start(body, here, tenant, idempotency_key, secured=body.secure)


@router.post("/v2/sandboxes", status_code=201)
async def create_v2(body: NewSandbox, here: Here, tenant: Tenant, idempotency_key: Key = None) -> SandboxView:
    """Start a sandbox whose envd needs its token."""
    return await start(body, here, tenant, idempotency_key, secured=True)


@router.get("/v2/sandboxes")
async def list_v2(
    here: Here,
    tenant: Tenant,
    response: Response,
    metadata: str | None = None,
    state: Annotated[list[str] | None, Query()] = None,
    order: str | None = None,
    startedAfter: str | None = None,
    template: str | None = None,
    limit: int | None = None,
    nextToken: str | None = None,
) -> list[ListedSandbox]:
    """One page of sandboxes; `X-Next-Token` leads to the next."""
    everyone = here.manager.everyone(tenant)
    found, token = page(everyone, parse_query(metadata, state, order, startedAfter, template, limit, nextToken))
    response.headers["X-Total-Running"] = str(sum(not sandbox.is_paused for sandbox in everyone))
    if token is not None:
        response.headers["X-Next-Token"] = token
    return [ListedSandbox(**ListedSandbox.fields_of(sandbox)) for sandbox in found]


@router.get("/sandboxes", deprecated=True)
async def list_v1(here: Here, tenant: Tenant, metadata: str | None = None) -> list[ListedSandbox]:
    """All running sandboxes, the newest first."""
    wanted = parse_metadata(metadata).items()
    found = [s for s in here.manager.everyone(tenant) if not s.is_paused and wanted <= dict(s.metadata).items()]
    found.sort(key=lambda s: (s.started_at, s.id), reverse=True)
    return [ListedSandbox(**ListedSandbox.fields_of(sandbox)) for sandbox in found]


@router.get("/sandboxes/metrics")
async def metrics_of_many(here: Here, tenant: Tenant, sandbox_ids: str) -> dict[str, dict[str, SandboxMetric]]:
    """The newest sample of each sandbox that runs."""
    wanted = set(sandbox_ids.split(","))
    return {
        "sandboxes": {
            sandbox.id: SandboxMetric.of(await here.usage.now(sandbox), sandbox.resources)
            for sandbox in here.manager.all(tenant)
            if sandbox.id in wanted
        }
    }


@router.get("/sandboxes/{sandbox_id}", response_model_exclude_none=True)
async def info(sandbox_id: str, here: Here, tenant: Tenant) -> SandboxDetail:
    """A sandbox, running or paused. For one that died lately: 404 with its reason in `error_code`."""
    sandbox = here.manager.get(tenant, sandbox_id)
    token = here.tokens.of(sandbox.id) if sandbox.secured else None
    domain = here.manager.settings.server.domain
    return SandboxDetail(
        **ListedSandbox.fields_of(sandbox),
        envdAccessToken=token,
        domain=domain,
        lifecycle=Lifecycle.of(sandbox),
        network=shown_network(sandbox.network),
        allowInternetAccess=internet_access(sandbox.network, here.manager.settings.network),
        pauseMode=sandbox.pause_mode.value if sandbox.pause_mode is not None else None,
    )


@router.delete("/sandboxes/{sandbox_id}", status_code=204)
async def kill(sandbox_id: str, here: Here, tenant: Tenant) -> None:
    """Destroy a sandbox; answers when nothing is left of it."""
    sandbox = here.manager.get(tenant, sandbox_id)
    await here.manager.kill(sandbox.id, DeathReason.KILLED, "killed by its owner")


@router.get("/sandboxes/{sandbox_id}/metrics")
async def metrics(
    sandbox_id: str, here: Here, tenant: Tenant, start: float | None = None, end: float | None = None
) -> list[SandboxMetric]:
    """Samples of the last hour, within `start` and `end` (seconds since the epoch)."""
    sandbox = here.manager.get(tenant, sandbox_id)
    samples = await here.usage.between(sandbox, start, end)
    return [SandboxMetric.of(sample, sandbox.resources) for sample in samples]


async def start(
    body: NewSandbox, here: Context, tenant: str, key: str | None, *, secured: bool, resources: Resources | None = None
) -> SandboxView:
    """Make the sandbox that every kind of create asks for. `resources` None: the template's."""
    try:
        request = replace(_request(body, here, tenant, secured), resources=resources)
        wanted = f"{secured} {resources} {body!r}"
        sandbox = await here.idempotency.create(tenant, key, lambda: here.manager.create(request), wanted)
    except SandyardError as error:
        here.metrics.refused(404 if isinstance(error, SandboxDied) else error.http_status)
        raise
    return view_of(here, sandbox)


def _request(body: NewSandbox, here: Context, tenant: str, secured: bool) -> CreateRequest:
    timeout = here.manager.settings.sandbox.timeout if body.timeout is None else float(body.timeout)
    if timeout <= 0:
        raise BadRequest(f"timeout: {body.timeout} is not more than 0 seconds", field="timeout")
    if body.volumeMounts:
        raise Unsupported(f"volumeMounts: not supported by runtime {here.manager.runtime.name}")
    idle = body.metadata.get(IDLE_KEY)
    network = checked_network(
        body.network, body.allow_internet_access, secured=secured, settings=here.manager.settings.network
    )
    return CreateRequest(
        tenant=tenant,
        template=body.templateID,
        timeout=timeout,
        metadata=body.metadata,
        envs=body.envVars,
        secured=secured,
        lease_id=body.metadata.get(LEASE_KEY),
        idle_timeout=_idle(idle) if idle is not None else None,
        network=network,
        extension=checked_params(body.customExtensionParams, here.hooks),
        policy=_policy(body),
    )


def _policy(body: NewSandbox) -> TimeoutPolicy:
    """Raises `BadRequest` for a combination that E2B refuses too."""
    resumes = body.autoResume is not None and body.autoResume.enabled
    if not body.autoPauseMemory and not body.autoPause:
        raise BadRequest("autoPauseMemory: false needs autoPause: true", field="autoPauseMemory")
    if not body.autoPauseMemory and resumes:
        raise BadRequest(
            "autoPauseMemory: false cannot be combined with autoResume: what is paused with its files only is resumed "
            "by connect, not by traffic",
            field="autoResume",
        )
    on_timeout = OnTimeout.PAUSE if body.autoPause else OnTimeout.KILL
    return TimeoutPolicy(on_timeout, body.autoPauseMemory, resumes)


def _idle(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise BadRequest(f"metadata.{IDLE_KEY}: '{value}' is not a number of seconds", field=f"metadata.{IDLE_KEY}")
    return seconds


def view_of(here: Context, sandbox: Sandbox) -> SandboxView:
    token = here.tokens.of(sandbox.id) if sandbox.secured else None
    view = SandboxView.of(sandbox, token, here.manager.settings.server.domain)
    if not Ingress.of(sandbox.network).public:
        view.trafficAccessToken = here.tokens.traffic_of(sandbox.id)
    return view
