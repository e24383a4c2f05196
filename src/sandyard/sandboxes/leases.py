"""Dead-man leases: a client that stops renewing loses its sandboxes.

Renewals live in memory only. After a restart of the server every lease starts with its full `ttl`
again, because its client had nobody to renew it with.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from sandyard.errors import NotFound
from sandyard.sandboxes.model import new_id
from sandyard.sandboxes.timers import Timers
from sandyard.store import LeaseRecord, Store


@dataclass(slots=True)
class Lease:
    """`ttl` in seconds; `expires_at` in seconds since the epoch."""

    id: str
    tenant: str
    ttl: float
    expires_at: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Leases:
    """`on_expiry` is called in the event loop with a lease that ran out; it no longer counts by then."""

    def __init__(self, store: Store, timers: Timers, on_expiry: Callable[[Lease], None]) -> None:
        self._store = store
        self._timers = timers
        self._on_expiry = on_expiry
        self._leases: dict[str, Lease] = {}

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._leases

    async def load(self) -> None:
        for record in await self._store.leases():
            self._hold(Lease(record.id, record.tenant, record.ttl, 0.0, record.labels))

    async def create(self, tenant: str, ttl: float, labels: Mapping[str, str]) -> Lease:
        lease = Lease(new_id(), tenant, ttl, time.time() + ttl, dict(labels))
        await self._store.add_lease(LeaseRecord(lease.id, tenant, ttl, time.time(), lease.labels))
        self._hold(lease)
        return lease

    def get(self, tenant: str, lease_id: str) -> Lease:
        """Raises `NotFound`; another tenant's lease is as unknown as one that expired."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.tenant != tenant:
            raise NotFound(f"lease '{lease_id}' not found", remedy="it expired or was never made; create a new one")
        return lease

    def renew(self, tenant: str, lease_id: str) -> Lease:
        lease = self.get(tenant, lease_id)
        self._hold(lease)
        return lease

    async def drop(self, lease: Lease, sweep: Callable[[Lease], Awaitable[None]]) -> None:
        """End a lease: no new sandbox may join it, then `sweep` its sandboxes, then forget it."""
        self._timers.cancel(f"lease:{lease.id}")
        self._leases.pop(lease.id, None)
        await sweep(lease)
        await self._store.drop_lease(lease.id)

    def _hold(self, lease: Lease) -> None:
        lease.expires_at = time.time() + lease.ttl
        self._leases[lease.id] = lease
        self._timers.set(f"lease:{lease.id}", lease.ttl, lambda: self._expire(lease))

    def _expire(self, lease: Lease) -> None:
        self._leases.pop(lease.id, None)
        self._on_expiry(lease)
