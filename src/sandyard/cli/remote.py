"""What the command line shows and does about the storage that nodes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sandyard.cli.console import stderr, stdout
from sandyard.config import Settings, load_settings
from sandyard.errors import ConfigError, SandyardError

if TYPE_CHECKING:
    from sandyard.store.blobs import BlobStore

_LINE_SECONDS = 2.0  # between lines where they do not replace each other


class TransferLine:
    """Progress of one transfer: a line that changes on a terminal, else one every other second."""

    def __init__(self, direction: str, snapshot: str) -> None:
        self._what = f"{direction} {snapshot}"
        self._shown = False
        self._told_at = time.monotonic()

    def update(self, state: Mapping[str, Any]) -> None:
        done, total, moved = (state[name] / (1 << 20) for name in ("doneBytes", "totalBytes", "movedBytes"))
        text = f"{self._what}: {done:.1f} of {total:.1f} MB, {moved:.1f} MB over the wire"
        if stderr.is_terminal:
            stderr.print(f"\r{text}\x1b[K", end="", markup=False, highlight=False, soft_wrap=True)
            self._shown = True
        elif time.monotonic() - self._told_at > _LINE_SECONDS:
            stderr.print(text, markup=False, highlight=False, soft_wrap=True)
            self._told_at = time.monotonic()

    def close(self) -> None:
        if self._shown:
            stderr.print()


def sweep_storage(*, dry_run: bool, deep: bool, repair: bool) -> None:
    """Remove what no snapshot needs; `deep` checks all that stays, and `repair` removes of that what is damaged.

    Raises `SandyardError` where something is."""
    settings = load_settings()
    asyncio.run(_sweep(settings, dry_run))
    if deep or repair:
        asyncio.run(_verify(settings, repair and not dry_run))


async def _sweep(settings: Settings, dry_run: bool) -> None:
    from sandyard.sandboxes.remote.sweeping import sweep

    found = await sweep(_storage(settings), settings.blobs.grace_hours * 3600, dry_run=dry_run)
    verb, count, size = "removed", found.removed, found.removed_bytes
    if dry_run:
        verb, count, size = "would remove", found.garbage, found.garbage_bytes
    young = f"; {found.young} younger than blobs.grace_hours stay" if found.young else ""
    stdout.print(
        f"{verb} {count} objects, {size / (1 << 20):.1f} MB{young}; "
        f"{found.snapshots} snapshots keep {found.kept_bytes / (1 << 20):.1f} MB",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


async def _verify(settings: Settings, repair: bool) -> None:
    from sandyard.sandboxes.remote.sweeping import verify

    found = await verify(_storage(settings), deep=True, repair=repair)
    for problem in found.problems:
        stdout.print(problem, markup=False, highlight=False, soft_wrap=True)
    if found.problems:
        removed = f", of which {found.removed} chunks were removed" if found.removed else ""
        raise SandyardError(
            f"{len(found.problems)} of what snapshots need is damaged or gone{removed}",
            remedy="push those snapshots again from a node that has them",
        )
    stdout.print(f"{len(found.chunks)} chunks of {len(found.layers)} layers are what they should be", highlight=False)


def _storage(settings: Settings) -> BlobStore:
    from sandyard.store.blobs import open_blobs

    blobs = open_blobs(settings.blobs)
    if blobs is None:
        raise ConfigError("there is no storage for snapshots", remedy="set blobs.url")
    return blobs
