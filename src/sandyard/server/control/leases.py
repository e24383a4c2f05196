"""Sandyard's own: dead-man leases, sweeping by label, capacity."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter

from sandyard.sandboxes import Lease
from sandyard.server.control.context import Here, Tenant
from sandyard.server.control.models import Capacity, LeaseView, NewLease, SweepRequest, Swept

router = APIRouter(tags=["sandyard"])


@router.post("/leases", status_code=201)
async def create(body: NewLease, here: Here, tenant: Tenant) -> LeaseView:
    """Make a dead-man lease. Sandboxes created with metadata `sandyard.lease` = its id are killed with
    reason `lease` when it is not renewed within `ttl` seconds. `warm` announces bursts of creates."""
    templates = [(here.manager.catalog.get(wanted.templateID, tenant), wanted.count) for wanted in body.warm]
    lease = await here.manager.leases.create(tenant, body.ttl, body.labels)
    for template, count in templates:
        here.manager.reserve(template, count)
    return _view(lease)


@router.post("/leases/{lease_id}/renew", status_code=204)
async def renew(lease_id: str, here: Here, tenant: Tenant) -> None:
    """Let the lease run for its `ttl` from now. 404: it has expired, its sandboxes are gone."""
    here.manager.leases.renew(tenant, lease_id)


@router.delete("/leases/{lease_id}", status_code=204)
async def end(lease_id: str, here: Here, tenant: Tenant) -> None:
    """End the lease and kill its sandboxes; answers when they are gone."""
    await here.manager.drop_lease(here.manager.leases.get(tenant, lease_id))


@router.post("/sweep")
async def sweep(body: SweepRequest, here: Here, tenant: Tenant) -> Swept:
    """Kill every sandbox that carries all of these labels."""
    return Swept(sandboxIDs=list(await here.manager.sweep(tenant, body.metadata)))


@router.get("/capacity")
async def capacity(here: Here, _tenant: Tenant) -> Capacity:
    """How many sandboxes fit. Warm ones make room for whoever needs it, so they count as free."""
    return Capacity(**here.manager.capacity())


def _view(lease: Lease) -> LeaseView:
    return LeaseView(leaseID=lease.id, ttl=lease.ttl, expiresAt=datetime.fromtimestamp(lease.expires_at, UTC))
