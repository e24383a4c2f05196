"""Snapshots of this node in blob storage, and those of others on this node.

Who may read the storage may read every snapshot in it: tenants are kept apart by the nodes, each asking in its
tenant's own folder only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sandyard.sandboxes.copying import Snapshot
from sandyard.sandboxes.remote.download import Downloader
from sandyard.sandboxes.remote.fetching import Fetching
from sandyard.sandboxes.remote.known import Known
from sandyard.sandboxes.remote.lazy import LazyLayers
from sandyard.sandboxes.remote.listing import Listing
from sandyard.sandboxes.remote.manifest import Listed
from sandyard.sandboxes.remote.pending import Pending
from sandyard.sandboxes.remote.policy import Policy
from sandyard.sandboxes.remote.pushing import Pushing
from sandyard.sandboxes.remote.transfer import Transfer
from sandyard.sandboxes.remote.transfers import Transfers
from sandyard.store.blobs import BlobStore

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager


class RemoteSnapshots:
    """Used from one event loop, between `start` and `stop`."""

    def __init__(self, manager: SandboxManager, blobs: BlobStore) -> None:
        home = manager.settings.paths.state.absolute() / "blobs"
        pending = Pending(home / "pending")
        self.name = blobs.name
        self._known = Known(home / "layers")
        self._transfers = Transfers()
        self._listing = Listing(blobs, manager.catalog)
        self._pushing = Pushing(manager, blobs, self._known, pending, self._transfers)
        self._policy = Policy(manager, self._pushing, pending)
        self._lazy = LazyLayers(manager.settings)
        home = manager.catalog.layers_home
        down = Downloader(blobs, self._known, manager.settings, manager.runtime, home, self._lazy)
        self._fetching = Fetching(manager, self._listing, down, self._transfers)

    async def start(self) -> None:
        """Go on with the uploads that an earlier server promised."""
        await asyncio.to_thread(self._known.tidy)
        await self._lazy.start()
        await self._policy.resume()

    async def stop(self) -> None:
        """What is under way is left where it is: uploads go on at the next start."""
        await self._transfers.stop()

    async def close(self) -> None:
        """After `stop`, and after the sandboxes: those read their layers to the last."""
        await self._lazy.stop()

    async def made(self, snapshot: Snapshot) -> None:
        """A snapshot was made here: do what `blobs.upload` says. Raises `BlobError` where that is `sync`."""
        await self._policy.made(snapshot)

    async def push(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot; one that is there already costs a request a chunk. Raises `Unsupported` before anything
        is sent, `BlobError`, `SandboxError`."""
        return await self._pushing.push(snapshot)

    def push_soon(self, snapshot: Snapshot) -> Transfer:
        """Upload a snapshot in the background. Raises `Unsupported`."""
        return self._pushing.push_soon(snapshot)

    async def list(self, tenant: str) -> Sequence[Listed]:
        """The tenant's snapshots in the storage, the newest first. One that is damaged is left out, and logged."""
        return await self._listing.all(tenant)

    async def fetch(self, tenant: str, text: str) -> bool:
        """Bring a snapshot that this node does not know; whether there is such a one, as `Listing.look_up` says.

        Raises like `pull`."""
        manifest = await self._listing.look_up(tenant, text)
        if manifest is not None:
            await self._fetching.pull(tenant, manifest)
        return manifest is not None

    async def pull(self, tenant: str, text: str) -> Snapshot:
        """Bring a snapshot to this node, its newest state if it is here already.

        Raises `NotFound`, `BlobError` naming what is damaged or missing, `CapacityError`, `HostError` (the disk)."""
        return await self._fetching.pull(tenant, await self._listing.get(tenant, text))

    async def pull_soon(self, tenant: str, text: str) -> Transfer:
        """Like `pull`, in the background. Raises `NotFound`, `BlobError`."""
        return self._fetching.pull_soon(tenant, await self._listing.get(tenant, text))

    async def remove(self, tenant: str, text: str) -> None:
        """Forget a snapshot in the storage; its chunks go when garbage is removed. Raises `NotFound`, `BlobError`."""
        await self._listing.remove(tenant, text)

    def transfers(self, tenant: str) -> Sequence[Transfer]:
        """What is under way and what lately was, the newest first."""
        return self._transfers.of(tenant)
