"""Which snapshots of a tenant are in the storage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from sandyard.errors import NotFound
from sandyard.sandboxes.catalog import DEFAULT_TAG, Catalog, Reference
from sandyard.sandboxes.copying import KIND, Snapshot
from sandyard.sandboxes.remote.manifest import Listed, SnapshotManifest, folder_of, is_id, is_new_id
from sandyard.store.blobs import BlobDamaged, BlobMissing, BlobRefused, BlobStore, BlobUnreachable

log = structlog.get_logger("sandyard.remote")

_READ_AT_ONCE = 16
_NAME_SECONDS = 5.0  # for a word that is most likely a mistake
_AWAY_SECONDS = 15.0  # without asking again for such words


class Listing:
    """Each tenant's snapshots are in a folder of its own, and nobody else's are read for it."""

    def __init__(self, blobs: BlobStore, catalog: Catalog) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._away_until = 0.0
        self._seen: dict[str, set[str]] = {}  # tenant: what its snapshots were called when they last could be listed

    async def all(self, tenant: str) -> Sequence[Listed]:
        """The tenant's snapshots, the newest first. One that is damaged is left out, and logged."""
        found = await self._in(tenant, folder_of(tenant))
        self._seen[tenant] = {name for each in found for name in (each.manifest.template_id, *each.manifest.names)}
        return found

    async def get(self, tenant: str, text: str) -> SnapshotManifest:
        """By name or id, with or without a tag. Raises `NotFound`, `BlobError`."""
        manifest = await self.find(tenant, text)
        if manifest is None:
            raise NotFound(
                f"snapshot '{text}' is not in {self._blobs.name}", remedy="`sandyard snapshot list --remote`"
            )
        return manifest

    async def find(self, tenant: str, text: str) -> SnapshotManifest | None:
        """Like `get`; None where there is no such snapshot."""
        reference, folder = Reference.parse(text), folder_of(tenant)
        by_id = await self._in(tenant, f"{folder}/{reference.name}") if is_id(reference.name) else []
        for each in by_id or await self.all(tenant):
            manifest = each.manifest
            tags = manifest.tag, manifest.build_id
            if reference.name in (manifest.template_id, *manifest.names) and (reference.tag or DEFAULT_TAG) in tags:
                return manifest
        return None

    async def look_up(self, tenant: str, text: str) -> SnapshotManifest | None:
        """Like `find`, for a word that this node does not know. What is a template of this node is none of the
        storage's. Where the storage cannot be asked, a word that it is not known to have had, and that is not of the
        form that only ids have, is taken for a mistake: None. Raises `BlobError` for the others."""
        name = Reference.parse(text).name
        if self._is_of_this_node(tenant, name):
            return None
        if is_new_id(name) or name in self._seen.get(tenant, ()):
            return await self.find(tenant, text)
        if time.monotonic() < self._away_until:
            return None
        try:
            async with asyncio.timeout(_NAME_SECONDS):
                return await self.find(tenant, text)
        except (BlobUnreachable, BlobRefused, TimeoutError) as error:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            log.error("the storage cannot be asked for a snapshot", name=name, error=str(error) or "it is slow")
            return None

    async def remove(self, tenant: str, text: str) -> None:
        """Forget a snapshot; its chunks go when garbage is removed. Raises `NotFound`."""
        await self._blobs.delete((await self.get(tenant, text)).key)

    def here(self, manifest: SnapshotManifest) -> Snapshot | None:
        """What this node has of that state of it."""
        template = self._catalog.by_id(manifest.template_id)
        if template is None or template.tenant != manifest.tenant or template.kind != KIND:
            return None
        build = template.builds.get(manifest.build_id)
        if build is None:
            return None
        return Snapshot(template, manifest.tag, build)

    async def _in(self, tenant: str, folder: str) -> Sequence[Listed]:
        gate = asyncio.Semaphore(_READ_AT_ONCE)

        async def read(key: str) -> Listed | None:
            async with gate:
                try:
                    manifest = SnapshotManifest.parse(await self._blobs.get(key), key)
                except (BlobDamaged, BlobMissing) as error:
                    log.error("a snapshot in the storage cannot be read", error=str(error))
                    return None
            return Listed(manifest, self.here(manifest) is not None) if manifest.tenant == tenant else None

        keys = [info.key async for info in self._blobs.list(folder)]
        found = [each for each in await asyncio.gather(*map(read, keys)) if each is not None]
        return sorted(found, key=lambda each: (each.manifest.created_at, each.manifest.id), reverse=True)

    def _is_of_this_node(self, tenant: str, name: str) -> bool:
        try:
            return self._catalog.find(name, tenant).kind != KIND
        except NotFound:
            return False
