"""Snapshots of this node in blob storage, and those of others on this node.

A snapshot is seen in the storage once its own object is there, which is written last; on this node, once its build is
recorded, which is done last. Who may read the storage may read every snapshot in it: tenants are kept apart by the
nodes, each asking in its tenant's own folder only.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import CapacityError, Conflict, NotFound, SandyardError
from sandyard.runtimes.base import Rootfs
from sandyard.sandboxes.catalog import DEFAULT_TAG, Build, Reference, Template
from sandyard.sandboxes.copying import KIND, Snapshot
from sandyard.sandboxes.remote.download import Downloader
from sandyard.sandboxes.remote.intents import uploading
from sandyard.sandboxes.remote.known import Known
from sandyard.sandboxes.remote.manifest import LayerManifest, Listed, SnapshotManifest, folder_of, is_id
from sandyard.sandboxes.remote.pending import Pending
from sandyard.sandboxes.remote.source import LayerGone
from sandyard.sandboxes.remote.transfer import Direction, Transfer
from sandyard.sandboxes.remote.upload import Uploader
from sandyard.store.blobs import BlobDamaged, BlobError, BlobMissing, BlobStore

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.remote")

_KEPT = 200  # finished transfers whose state is still told
_RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0)
_TRIES = 3  # of one upload whose layers are merged meanwhile
_DELETED_SECONDS = 60.0
_READ_AT_ONCE = 16


class RemoteSnapshots:
    """Used from one event loop, between `start` and `stop`."""

    def __init__(self, manager: SandboxManager, blobs: BlobStore) -> None:
        home = manager.settings.paths.state.absolute() / "blobs"
        known = Known(home / "layers")
        self._manager = manager
        self._blobs = blobs
        self._known = known
        self._pending = Pending(home / "pending")
        self._policy = manager.settings.blobs.upload
        self._up = Uploader(blobs, known, manager.settings, manager.runtime)
        self._down = Downloader(blobs, known, manager.settings, manager.runtime, manager.catalog.layers_home)
        self._transfers: dict[tuple[Direction, str], Transfer] = {}
        self._tasks: dict[tuple[Direction, str], asyncio.Task[None]] = {}
        self._pulling = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._blobs.name

    async def start(self) -> None:
        """Go on with the uploads that an earlier server promised."""
        await asyncio.to_thread(self._known.tidy)
        for build_id, tenant, reference in await asyncio.to_thread(self._pending.all):
            with contextlib.suppress(NotFound):  # deleted meanwhile
                snapshot = self._manager.copying.get(tenant, reference)
                if snapshot.build.id == build_id:
                    self.push_soon(snapshot)
                    continue
            await asyncio.to_thread(self._pending.drop, build_id)

    async def stop(self) -> None:
        """What is under way is left where it is: uploads go on at the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- to the storage ---

    async def made(self, snapshot: Snapshot) -> None:
        """A snapshot was made here: do what `blobs.upload` says. Raises `BlobError` where that is `sync`."""
        if self._policy == "off":
            return
        await asyncio.to_thread(self._pending.put, snapshot)
        if self._policy == "on_snapshot":
            self.push_soon(snapshot)
            return
        try:
            await self.push(snapshot)
        except SandyardError as error:
            self.push_soon(snapshot)
            raise BlobError(
                f"snapshot {snapshot.id} is on this node, and could not be uploaded: {error.message}",
                remedy="it is tried again in the background",
            ) from error

    def push_soon(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot in the background, for as many tries as it takes while it exists."""
        return self._begin("push", snapshot.template.tenant or "", snapshot.id, snapshot.build.id, snapshot)

    async def push(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot; one that is there already costs a few requests. Raises `BlobError`, `SandboxError`."""
        transfer = Transfer(snapshot.template.tenant or "", snapshot.id, snapshot.build.id, "push", "running")
        self._note(transfer)
        try:
            await self._push(snapshot, transfer)
        except SandyardError as error:
            transfer.finish(str(error))
            raise
        except BaseException:
            transfer.finish("it was called off")
            raise
        transfer.finish()
        return transfer

    async def _push(self, snapshot: Snapshot, transfer: Transfer) -> None:
        with self._manager.maker.holding(snapshot.build.rootfs):
            async with uploading(self._blobs):
                layers = [await self._layer(layer, transfer) for layer in snapshot.build.rootfs.layers]
                manifest = _manifest(snapshot, layers, self._manager.runtime.name)
                await self._blobs.put(manifest.key, manifest.text())
        await asyncio.to_thread(self._pending.drop, snapshot.build.id)
        log.info("snapshot uploaded", snapshot=snapshot.id, bytes=transfer.moved_bytes, skipped=transfer.skipped_bytes)

    async def _layer(self, layer: Path, transfer: Transfer) -> str:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(LayerGone):
                return await self._up.layer(layer, transfer)
        return await self._up.layer(layer, transfer)

    # --- from the storage ---

    async def list(self, tenant: str) -> Sequence[Listed]:
        """The tenant's snapshots in the storage, the newest first. One that is damaged is left out, and logged."""
        return await self._listed(tenant, folder_of(tenant))

    async def _listed(self, tenant: str, folder: str) -> Sequence[Listed]:
        gate = asyncio.Semaphore(_READ_AT_ONCE)

        async def read(key: str) -> Listed | None:
            async with gate:
                try:
                    manifest = SnapshotManifest.parse(await self._blobs.get(key), key)
                except (BlobDamaged, BlobMissing) as error:
                    log.error("a snapshot in the storage cannot be read", error=str(error))
                    return None
            return Listed(manifest, self._here(manifest) is not None) if manifest.tenant == tenant else None

        keys = [info.key async for info in self._blobs.list(folder)]
        found = [each for each in await asyncio.gather(*map(read, keys)) if each is not None]
        return sorted(found, key=lambda each: (each.manifest.created_at, each.manifest.id), reverse=True)

    async def fetch(self, tenant: str, text: str) -> bool:
        """Bring a snapshot that this node does not know; whether there is such a one.

        Raises like `pull`."""
        manifest = await self._find(tenant, text)
        if manifest is None:
            return False
        await self._pull(tenant, manifest)
        return True

    async def pull(self, tenant: str, text: str) -> Snapshot:
        """Bring a snapshot to this node, its newest state if it is here already.

        Raises `NotFound`, `BlobError` naming what is damaged or missing, `CapacityError`, `HostError` (the disk)."""
        manifest = await self._find(tenant, text)
        if manifest is None:
            raise NotFound(f"snapshot '{text}' is not in {self.name}", remedy="`sandyard snapshot list --remote`")
        return await self._pull(tenant, manifest)

    async def pull_soon(self, tenant: str, text: str) -> Transfer:
        """Like `pull`, in the background. Raises `NotFound`."""
        manifest = await self._find(tenant, text)
        if manifest is None:
            raise NotFound(f"snapshot '{text}' is not in {self.name}", remedy="`sandyard snapshot list --remote`")
        return self._begin("pull", tenant, manifest.id, manifest.build_id, manifest)

    async def remove(self, tenant: str, text: str) -> None:
        """Forget a snapshot in the storage; its chunks go when garbage is removed. Raises `NotFound`."""
        manifest = await self._find(tenant, text)
        if manifest is None:
            raise NotFound(f"snapshot '{text}' is not in {self.name}")
        await self._blobs.delete(manifest.key)

    def transfers(self, tenant: str) -> Sequence[Transfer]:
        """What is under way and what lately was, the newest first."""
        found = [each for each in self._transfers.values() if each.tenant == tenant]
        return sorted(found, key=lambda each: each.started_at, reverse=True)

    async def _pull(self, tenant: str, manifest: SnapshotManifest) -> Snapshot:
        transfer = self._begin("pull", tenant, manifest.id, manifest.build_id, manifest)
        task = self._tasks.get(("pull", manifest.build_id))
        if task is not None:
            await asyncio.shield(task)  # whoever asked may go; others wait for it too
        if (found := self._here(manifest)) is None:
            raise BlobError(f"snapshot {manifest.id} could not be fetched: {transfer.error}")
        return found

    async def _find(self, tenant: str, text: str) -> SnapshotManifest | None:
        reference, folder = Reference.parse(text), folder_of(tenant)
        tagged = reference.tag or DEFAULT_TAG
        by_id = await self._listed(tenant, f"{folder}/{reference.name}") if is_id(reference.name) else []
        for each in by_id or await self._listed(tenant, folder):
            manifest = each.manifest
            if reference.name in (manifest.template_id, *manifest.names) and tagged in (
                manifest.tag,
                manifest.build_id,
            ):
                return manifest
        return None

    def _here(self, manifest: SnapshotManifest) -> Snapshot | None:
        with contextlib.suppress(NotFound):
            template = self._manager.catalog.find(manifest.template_id, manifest.tenant)
            build = template.builds.get(manifest.build_id)
            if build is not None and template.tenant == manifest.tenant and template.kind == KIND:
                return Snapshot(template, manifest.tag, build)
        return None

    async def _install(self, manifest: SnapshotManifest, transfer: Transfer) -> None:
        manager = self._manager
        if self._here(manifest) is not None:
            return
        self._check_quota(manifest.tenant)
        if manifest.runtime != manager.runtime.name:
            here = manager.runtime.name
            raise Conflict(f"snapshot {manifest.id} is of the runtime {manifest.runtime}, and this node's is {here}")
        layers = await self._down.needed(list(manifest.layers))
        with contextlib.ExitStack() as held:
            for digest, layer in layers.items():
                held.enter_context(manager.catalog.new_layer(self._down.path_of(digest, layer).name))
            owned = [layer for own in manager.copying.all(manifest.tenant) for layer in own.build.rootfs.layers]
            mine = await asyncio.to_thread(self._with_needs, owned)
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
        async with self._pulling:
            template = self._template(manifest)
            if template is None:
                names = [name for name in manifest.names if self._free(name, manifest.tenant)]
                template = await catalog.add_template(
                    manifest.tenant, KIND, names, source=manifest.source, template_id=manifest.template_id
                )
            now = time.time()
            build = Build(
                manifest.build_id,
                template.id,
                "ready",
                rootfs,
                dict(manifest.config),
                manifest.created_at,
                now,
                None,
                manifest.size_bytes,
            )
            await catalog.put_build(build)
            replaced = template.build(manifest.tag)
            await catalog.set_tags(template, build.id, [manifest.tag])
            if replaced is not None and replaced.id != build.id:
                await self._manager.copying.drop_untagged(template, replaced)

    def _template(self, manifest: SnapshotManifest) -> Template | None:
        """Raises `Conflict` where it is somebody else's here."""
        with contextlib.suppress(NotFound):
            template = self._manager.catalog.find(manifest.template_id)
            if template.id == manifest.template_id:
                if template.tenant != manifest.tenant or template.kind != KIND:
                    raise Conflict(f"snapshot {manifest.template_id} has the id of a template of this node")
                return template
        return None

    def _free(self, name: str, tenant: str) -> bool:
        try:
            return self._manager.catalog.find(name, tenant).tenant not in (tenant, None)
        except NotFound:
            return True

    def _check_quota(self, tenant: str) -> None:
        limit = self._manager.settings.sandbox.snapshots_mb
        held = self._manager.quota.snapshot_bytes(tenant) >> 20
        if limit and held >= limit:
            raise CapacityError(
                f"the snapshots of this tenant take {held} MiB, of {limit} they may (sandbox.snapshots_mb)",
                retry_after=_DELETED_SECONDS,
                remedy="delete some",
            )

    # --- in the background ---

    def _begin(
        self, direction: Direction, tenant: str, name: str, build_id: str, what: Snapshot | SnapshotManifest
    ) -> Transfer:
        key = direction, build_id
        if key in self._tasks:
            return self._transfers[key]
        transfer = Transfer(tenant, name, build_id, direction)
        self._note(transfer)
        work = self._pulled(what, transfer) if isinstance(what, SnapshotManifest) else self._pushed(what, transfer)
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return transfer

    def _ended(self, key: tuple[Direction, str], task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandyardError):
            log.error("a transfer failed", transfer=key, error=repr(error))

    async def _pulled(self, manifest: SnapshotManifest, transfer: Transfer) -> None:
        transfer.state = "running"
        try:
            await self._install(manifest, transfer)
        except BaseException as error:
            transfer.finish(str(error) or type(error).__name__)
            raise
        transfer.finish()
        log.info("snapshot fetched", snapshot=manifest.id, bytes=transfer.moved_bytes, skipped=transfer.skipped_bytes)

    async def _pushed(self, snapshot: Snapshot, transfer: Transfer) -> None:
        attempt = 0
        while True:
            transfer.state = "running"
            try:
                await self._push(snapshot, transfer)
            except SandyardError as error:
                if self._gone(snapshot):
                    await asyncio.to_thread(self._pending.drop, snapshot.build.id)
                    transfer.finish("the snapshot was deleted")
                    return
                wait = _RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS) - 1)]
                attempt += 1
                transfer.finish(str(error))
                log.error("snapshot could not be uploaded", snapshot=snapshot.id, error=str(error), again_in=wait)
                if not self._pending.has(snapshot.build.id):  # asked for once, and told that it failed
                    return
                await asyncio.sleep(wait)
                self._renew(transfer)
                continue
            transfer.finish()
            return

    def _renew(self, transfer: Transfer) -> None:
        transfer.total_bytes = transfer.done_bytes = transfer.skipped_bytes = 0
        transfer.error, transfer.finished_at = None, None

    def _gone(self, snapshot: Snapshot) -> bool:
        try:
            template = self._manager.catalog.find(snapshot.template.id)
        except NotFound:
            return True
        return snapshot.build.id not in template.builds

    def _note(self, transfer: Transfer) -> None:
        self._transfers.pop((transfer.direction, transfer.build_id), None)
        self._transfers[transfer.direction, transfer.build_id] = transfer
        old = [key for key, each in self._transfers.items() if each.finished_at is not None]
        for key in old[: max(0, len(old) - _KEPT)]:
            del self._transfers[key]


def _manifest(snapshot: Snapshot, layers: Sequence[str], runtime: str) -> SnapshotManifest:
    template, build = snapshot.template, snapshot.build
    kept = {key: value for key, value in build.config.items() if key not in ("env", "workdir", "user")}
    return SnapshotManifest(
        tenant=template.tenant or "",
        template_id=template.id,
        build_id=build.id,
        names=list(template.names),
        tag=snapshot.tag,
        source=template.source,
        created_at=build.created_at,
        size_bytes=build.size_bytes,
        runtime=runtime,
        layers=list(layers),
        env=dict(build.rootfs.env),
        workdir=build.rootfs.workdir,
        user=build.rootfs.user,
        config=kept,
    )
