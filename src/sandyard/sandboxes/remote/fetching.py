"""Snapshots of the storage on their way to this node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import Conflict, NotFound
from sandyard.runtimes.base import Rootfs
from sandyard.sandboxes.catalog import Build, Template
from sandyard.sandboxes.copying import KIND, Snapshot
from sandyard.sandboxes.remote.download import Downloader
from sandyard.sandboxes.remote.listing import Listing
from sandyard.sandboxes.remote.manifest import LayerManifest, SnapshotManifest
from sandyard.sandboxes.remote.source import present
from sandyard.sandboxes.remote.transfer import Transfer
from sandyard.sandboxes.remote.transfers import Transfers
from sandyard.store.blobs import BlobError

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.remote")


class Fetching:
    """A snapshot is seen on this node once its build is recorded, which is done last."""

    def __init__(self, manager: SandboxManager, listing: Listing, down: Downloader, transfers: Transfers) -> None:
        self._manager = manager
        self._listing = listing
        self._down = down
        self._transfers = transfers
        self._recording = asyncio.Lock()

    async def pull(self, tenant: str, manifest: SnapshotManifest) -> Snapshot:
        """Bring a snapshot here, if it is not. Raises `BlobError` naming what is damaged or missing, `CapacityError`,
        `Conflict`, `HostError` (the disk)."""
        transfer = self.pull_soon(tenant, manifest)
        await self._transfers.wait(transfer)
        if (found := self._listing.here(manifest)) is None:
            raise BlobError(f"snapshot {manifest.id} could not be fetched: {transfer.error}")
        return found

    def pull_soon(self, tenant: str, manifest: SnapshotManifest) -> Transfer:
        """Like `pull`, in the background."""
        transfer = Transfer(tenant, manifest.id, manifest.build_id, "pull")
        return self._transfers.begin(transfer, lambda begun: self._told(manifest, begun))

    async def _told(self, manifest: SnapshotManifest, transfer: Transfer) -> None:
        transfer.state = "running"
        try:
            await self._install(manifest, transfer)
        except BaseException as error:
            transfer.finish(str(error) or type(error).__name__)
            raise
        transfer.finish()
        log.info("snapshot fetched", snapshot=manifest.id, bytes=transfer.moved_bytes, skipped=transfer.skipped_bytes)

    async def _install(self, manifest: SnapshotManifest, transfer: Transfer) -> None:
        manager = self._manager
        if self._listing.here(manifest) is not None:
            return
        if manifest.runtime != manager.runtime.name:
            here = manager.runtime.name
            raise Conflict(f"snapshot {manifest.id} is of the runtime {manifest.runtime}, and this node's is {here}")
        layers = await self._down.needed(list(manifest.layers))
        with contextlib.ExitStack() as held:
            for digest, layer in layers.items():
                held.enter_context(manager.catalog.new_layer(self._down.path_of(digest, layer).name))
            owned = [layer for own in manager.copying.all(manifest.tenant) for layer in own.build.rootfs.layers]
            mine = await asyncio.to_thread(self._with_needs, owned)
            held.enter_context(manager.quota.fetch(manifest.tenant, await asyncio.to_thread(self._coming, layers)))
            await self._down.install(layers, transfer, mine)
            await self._record(manifest, layers)

    def _with_needs(self, layers: Sequence[Path]) -> set[Path]:
        """These layers and what they need. Blocking."""
        found: set[Path] = set()
        for layer in layers:
            below: Path | None = layer
            while below is not None and below not in found:
                found.add(below)
                below = self._manager.runtime.needs(below)
        return found

    async def _record(self, manifest: SnapshotManifest, layers: Mapping[str, LayerManifest]) -> None:
        catalog = self._manager.catalog
        paths = [self._down.path_of(digest, layers[digest]) for digest in manifest.layers]
        rootfs = Rootfs(paths, dict(manifest.env), manifest.workdir, manifest.user)
        async with self._recording:
            template = self._template(manifest)
            if template is None:
                names = [name for name in manifest.names if self._free(name, manifest.tenant)]
                template = await catalog.add_template(
                    manifest.tenant, KIND, names, source=manifest.source, template_id=manifest.template_id
                )
            build = await catalog.put_build(_build(manifest, template, rootfs))
            replaced = template.build(manifest.tag)
            await catalog.set_tags(template, build.id, [manifest.tag])
            if replaced is not None and replaced.id != build.id:
                await self._manager.copying.drop_untagged(template, replaced)

    def _template(self, manifest: SnapshotManifest) -> Template | None:
        """Raises `Conflict` where it is somebody else's here."""
        template = self._manager.catalog.by_id(manifest.template_id)
        if template is not None and (template.tenant != manifest.tenant or template.kind != KIND):
            raise Conflict(f"snapshot {manifest.template_id} has the id of a template of this node")
        return template

    def _free(self, name: str, tenant: str) -> bool:
        try:
            return self._manager.catalog.find(name, tenant).tenant not in (tenant, None)
        except NotFound:
            return True

    def _coming(self, layers: Mapping[str, LayerManifest]) -> int:
        """Bytes of those that are not here. Blocking."""
        return sum(layer.data_bytes for it, layer in layers.items() if not present(self._down.path_of(it, layer)))


def _build(manifest: SnapshotManifest, template: Template, rootfs: Rootfs) -> Build:
    config, made = dict(manifest.config), manifest.created_at
    return Build(manifest.build_id, template.id, "ready", rootfs, config, made, time.time(), None, manifest.size_bytes)
