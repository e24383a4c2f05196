"""Snapshots of this node on their way to the storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from sandyard.errors import SandyardError, Unsupported
from sandyard.runtimes.microvm.memory.image import is_chain
from sandyard.sandboxes.copying import Snapshot
from sandyard.sandboxes.remote.intents import uploading
from sandyard.sandboxes.remote.known import Known
from sandyard.sandboxes.remote.manifest import SnapshotManifest
from sandyard.sandboxes.remote.pending import Pending
from sandyard.sandboxes.remote.source import LayerGone
from sandyard.sandboxes.remote.transfer import Transfer
from sandyard.sandboxes.remote.transfers import Transfers
from sandyard.sandboxes.remote.upload import Uploader
from sandyard.store.blobs import BlobStore

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager

log = structlog.get_logger("sandyard.remote")

_RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0)
_TRIES = 3  # of one upload whose layers are merged meanwhile


class Pushing:
    """A snapshot is seen in the storage once its own object is there, which is written last."""

    def __init__(
        self, manager: SandboxManager, blobs: BlobStore, known: Known, pending: Pending, transfers: Transfers
    ) -> None:
        self._manager = manager
        self._blobs = blobs
        self._pending = pending
        self._transfers = transfers
        self._up = Uploader(blobs, known, manager.settings, manager.runtime)

    async def push(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot; one that is there already costs a request a chunk. Raises `Unsupported` before anything is
        sent, `BlobError`, `SandboxError`."""
        transfer = _transfer(snapshot)
        transfer.state = "running"
        self._transfers.note(transfer)
        try:
            await self._send(snapshot, transfer)
        except SandyardError as error:
            transfer.finish(str(error))
            raise
        except BaseException:
            transfer.finish("it was called off")
            raise
        transfer.finish()
        return transfer

    def push_soon(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot in the background; one that was promised for as many tries as it takes while it exists.

        Raises `Unsupported`."""
        return self._transfers.begin(_transfer(snapshot), lambda transfer: self._until_sent(snapshot, transfer))

    async def _until_sent(self, snapshot: Snapshot, transfer: Transfer) -> None:
        attempt = 0
        while True:
            transfer.state = "running"
            try:
                await self._send(snapshot, transfer)
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
                transfer.renew()
                continue
            transfer.finish()
            return

    async def _send(self, snapshot: Snapshot, transfer: Transfer) -> None:
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

    def _gone(self, snapshot: Snapshot) -> bool:
        template = self._manager.catalog.by_id(snapshot.template.id)
        return template is None or snapshot.build.id not in template.builds


def _transfer(snapshot: Snapshot) -> Transfer:
    if snapshot.memory:
        raise Unsupported(
            f"snapshot {snapshot.id} has memory, which stays on its node",
            remedy="pause the sandbox with its files only, and snapshot it then",
        )
    for layer in snapshot.build.rootfs.layers:
        if is_chain(layer):
            raise Unsupported(
                f"snapshot {snapshot.id} stands on {layer.name}, the disk of a snapshot with memory, which stays here"
            )
    return Transfer(snapshot.template.tenant or "", snapshot.id, snapshot.build.id, "push")


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
