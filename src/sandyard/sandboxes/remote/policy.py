"""Which snapshots are uploaded without being asked for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from sandyard.errors import NotFound, SandyardError
from sandyard.sandboxes.copying import Snapshot
from sandyard.sandboxes.remote.pending import Pending
from sandyard.sandboxes.remote.pushing import Pushing
from sandyard.store.blobs import BlobError

if TYPE_CHECKING:
    from sandyard.sandboxes.manager import SandboxManager


class Policy:
    """`blobs.upload`: what was promised is kept, also by the next server."""

    def __init__(self, manager: SandboxManager, pushing: Pushing, pending: Pending) -> None:
        self._manager = manager
        self._pushing = pushing
        self._pending = pending
        self._upload = manager.settings.blobs.upload

    async def resume(self) -> None:
        """Go on with the uploads that an earlier server promised."""
        for build_id, tenant, reference in await asyncio.to_thread(self._pending.all):
            with contextlib.suppress(NotFound):  # deleted meanwhile
                snapshot = self._manager.copying.get(tenant, reference)
                if snapshot.build.id == build_id:
                    self._pushing.push_soon(snapshot)
                    continue
            await asyncio.to_thread(self._pending.drop, build_id)

    async def made(self, snapshot: Snapshot) -> None:
        """A snapshot was made here. Raises `BlobError` where it should be in the storage before that is told."""
        if self._upload == "off":
            return
        await asyncio.to_thread(self._pending.put, snapshot)
        if self._upload == "on_snapshot":
            self._pushing.push_soon(snapshot)
            return
        try:
            await self._pushing.push(snapshot)
        except SandyardError as error:
            self._pushing.push_soon(snapshot)
            raise BlobError(
                f"snapshot {snapshot.id} is on this node, and could not be uploaded: {error.message}",
                remedy="it is tried again in the background",
            ) from error
