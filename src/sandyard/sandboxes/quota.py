"""What one tenant may hold of a node, so that others find room too."""

from __future__ import annotations

import contextlib
import stat
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sandyard.errors import CapacityError, SandboxError
from sandyard.runtimes.container.derived import delta_of
from sandyard.sandboxes.catalog import Build
from sandyard.sandboxes.model import Sandbox
from sandyard.store.blobs.lazy.order import PART

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
        self._check_snapshots(sandbox.tenant, 0)
        sizes = sandbox.resources
        most = sizes.disk_mb + (sizes.memory_mb if self._manager.copying.keeps_memory(sandbox) else 0)
        with _counted(self._copying, sandbox.tenant, most):
            yield

    @contextlib.contextmanager
    def fetch(self, tenant: str, size_bytes: int) -> Iterator[None]:
        """While so much of a snapshot comes from elsewhere. Raises `CapacityError` where its tenant's would take more
        than they may."""
        coming = -(-size_bytes >> 20)
        self._check_snapshots(tenant, coming)
        with _counted(self._copying, tenant, coming):
            yield

    def _check_snapshots(self, tenant: str, coming: int) -> None:
        limit = self._manager.settings.sandbox.snapshots_mb
        if not limit:
            return
        held = (self.snapshot_bytes(tenant) >> 20) + self._copying[tenant]
        if held >= limit or held + coming > limit:
            more = f", and {coming} MiB more are wanted" if coming else ""
            raise CapacityError(
                f"the snapshots of this tenant take {held} MiB, of {limit} they may{more} (sandbox.snapshots_mb)",
                retry_after=DELETED_SECONDS,
                remedy="delete some",
            )

    def snapshot_bytes(self, tenant: str) -> int:
        """Of the layers that the tenant's snapshots wrote, as they are on the disk now, and of those below that only
        they keep: of snapshots that were deleted. What anybody's template or another snapshot has is that one's; what
        several of the tenant's share counts once, also when the one that wrote it is deleted."""
        catalog = self._manager.catalog
        theirs, templates, mine = set[Path](), set[Path](), list[Build]()
        for template in catalog.all():
            for build in template.builds.values():
                if template.kind != "snapshot":
                    theirs.update(build.rootfs.layers)
                    templates.update(build.rootfs.layers)
                elif template.tenant == tenant:
                    mine.append(build)
                else:
                    theirs.update(build.rootfs.layers[:1])
        tops = {layer for build in mine for layer in build.rootfs.layers[:1]}
        own = {layer for build in mine for layer in build.rootfs.layers if layer.parent == catalog.layers_home}
        below = {layer for layer in own | self._needed(own) if layer.parent == catalog.layers_home} - tops - theirs
        held = self._manager.runtime.held_bytes(tops | below, templates)
        if held is not None:
            return held
        written = (max(build.size_bytes, *map(_taken, build.rootfs.layers[:1]), 0) for build in mine)
        return sum(written) + sum(map(_taken, below))

    def _needed(self, layers: Collection[Path]) -> set[Path]:
        found: set[Path] = set()
        for layer in layers:
            with contextlib.suppress(SandboxError):  # a damaged one: whoever starts from it is told
                found |= self._manager.catalog.needed(self._manager.runtime, [layer])
        return found


def _taken(layer: Path) -> int:
    """Bytes on the disk of what a layer is kept in: not of an image that can be made again, nor of a directory, which
    may be everyone's."""
    for path in (delta_of(layer), layer, layer.with_name(layer.name + PART)):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                return found.st_blocks * 512
    return 0


@contextlib.contextmanager
def _counted(counter: Counter[str], tenant: str, amount: int) -> Iterator[None]:
    counter[tenant] += amount
    try:
        yield
    finally:
        counter[tenant] -= amount
        if not counter[tenant]:
            del counter[tenant]
