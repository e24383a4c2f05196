"""What one tenant may hold of a node, so that others find room too."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sandyard.errors import CapacityError
from sandyard.sandboxes.model import Sandbox

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

DELETED_SECONDS = 60.0  # what a tenant has to delete does not go by itself


class Quota:
    """`sandbox.per_tenant` sandboxes, running, paused or in the making, and `sandbox.snapshots_mb` of snapshots.
    Used from one event loop."""

    def __init__(self, manager: SandboxManager) -> None:
        self._manager = manager
        self._making: Counter[str] = Counter()
        self._copying: Counter[str] = Counter()  # MiB that copies under way may come to

    @contextlib.contextmanager
    def sandbox(self, tenant: str) -> Iterator[None]:
        """While one is made for this tenant. Raises `CapacityError`."""
        limit = self._manager.settings.sandbox.per_tenant
        held = len(self._manager.everyone(tenant)) + self._making[tenant]
        if limit and held >= limit:
            raise CapacityError(
                f"{held} sandboxes of this tenant run, are paused or are being made, as many as it may have "
                "(sandbox.per_tenant)",
                retry_after=self._manager.retry_after(),
                remedy="kill some",
            )
        with _counted(self._making, tenant, 1):
            yield

    @contextlib.contextmanager
    def snapshot(self, sandbox: Sandbox) -> Iterator[None]:
        """While a sandbox's files are copied to stay. Raises `CapacityError` where those of its tenant take all
        they may; the last copy may pass that by its own size."""
        limit, tenant = self._manager.settings.sandbox.snapshots_mb, sandbox.tenant
        held = (self.snapshot_bytes(tenant) >> 20) + self._copying[tenant]
        if limit and held >= limit:
            raise CapacityError(
                f"the snapshots of this tenant take {held} MiB, of {limit} they may (sandbox.snapshots_mb)",
                retry_after=DELETED_SECONDS,
                remedy="delete some",
            )
        with _counted(self._copying, tenant, sandbox.resources.disk_mb):
            yield

    def snapshot_bytes(self, tenant: str) -> int:
        templates = self._manager.catalog.all(tenant)
        mine = [each for each in templates if each.tenant == tenant and each.kind == "snapshot"]
        return sum(build.size_bytes for template in mine for build in template.builds.values())


@contextlib.contextmanager
def _counted(counter: Counter[str], tenant: str, amount: int) -> Iterator[None]:
    counter[tenant] += amount
    try:
        yield
    finally:
        counter[tenant] -= amount
        if not counter[tenant]:
            del counter[tenant]
