"""Fetching layers: every chunk checked, then the whole put in its place at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import structlog

from sandyard.config import Settings
from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.unpack import unpack_layer
from sandyard.runtimes.base import Runtime
from sandyard.runtimes.deltas import Delta
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.room import check_room
from sandyard.sandboxes.remote.known import Known, manifest_of
from sandyard.sandboxes.remote.lazy import LazyLayers
from sandyard.sandboxes.remote.manifest import LayerManifest, layer_key, tree_name
from sandyard.sandboxes.remote.source import DELTA, present
from sandyard.sandboxes.remote.transfer import Transfer
from sandyard.store.blobs import BlobDamaged, BlobMissing, BlobStore
from sandyard.store.blobs.chunks import chunk_key, decode

log = structlog.get_logger("sandyard.remote")

_PAGE = 4096
_PARTIAL = ".part"
_DEPTH = 64


class Downloader:
    """At most `blobs.concurrency` chunks are in memory or on their way. Layers go to `home`, where whoever removes
    unused ones must leave those alone whose names `names` gave."""

    def __init__(
        self, blobs: BlobStore, known: Known, settings: Settings, runtime: Runtime, home: Path, lazy: LazyLayers
    ) -> None:
        self._blobs = blobs
        self._runtime = runtime
        self._known = known
        self._settings = settings
        self._home = home
        self._lazy = lazy
        self._room = asyncio.Semaphore(settings.blobs.concurrency)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def manifest(self, digest: str) -> LayerManifest:
        """Raises `BlobMissing`, `BlobDamaged`."""
        return LayerManifest.parse(await self._blobs.get(layer_key(digest)), digest)

    async def needed(self, digests: list[str]) -> dict[str, LayerManifest]:
        """These layers and all that they need, each behind what it needs."""
        found: dict[str, LayerManifest] = {}

        async def visit(digest: str, depth: int) -> None:
            if digest in found:
                return
            manifest = await self.manifest(digest)
            if depth > _DEPTH:
                raise BlobDamaged(f"layer {digest} is more than {_DEPTH} differences deep")
            for parent in manifest.parents:
                await visit(parent, depth + 1)
            found[digest] = manifest

        for digest in digests:
            await visit(digest, 0)
        return found

    def path_of(self, digest: str, manifest: LayerManifest) -> Path:
        return self._home / (manifest.name or tree_name(digest))

    async def install(self, layers: dict[str, LayerManifest], transfer: Transfer, mine: Collection[Path] = ()) -> None:
        """Put layers, as `needed` gave them, where sandboxes can start from them. What is there already is left. Of
        `mine`, layers of the tenant itself, those of one name are one, however they are kept.

        Raises `BlobError` naming the chunk or the layer that is missing or not what it should be, and `HostError`
        where the disk is full; nothing half is left."""
        missing = [item for item in layers.items() if not await self._have(*item, mine)]
        transfer.total_bytes = sum(manifest.data_bytes for manifest in layers.values())
        transfer.skipped_bytes = transfer.total_bytes - sum(manifest.data_bytes for _, manifest in missing)
        transfer.done_bytes = transfer.skipped_bytes
        self._check_room(sum(m.data_bytes * (2 if m.kind == "tree" else 1) for _, m in missing))
        for digest, manifest in missing:
            async with self._locks[str(self.path_of(digest, manifest))]:
                if not await self._have(digest, manifest, mine):  # another transfer may have been quicker
                    await self._bring(digest, layers, transfer)

    async def _have(self, digest: str, manifest: LayerManifest, mine: Collection[Path]) -> bool:
        """Raises `BlobDamaged` where another layer has that name here."""
        path = self.path_of(digest, manifest)
        if not await asyncio.to_thread(present, path):
            return False
        if path.is_symlink():
            if await self._lazy.ensure(path, manifest):
                return True
            if await self._lazy.forsaken(path):
                return False
        if path in mine:
            return True
        known = await asyncio.to_thread(self._known.get, path)
        if known is None:  # one made here, or this process was killed before it took note
            known = await asyncio.to_thread(self._digest, path, manifest)
        if known != digest:
            raise BlobDamaged(f"layer {manifest.name} of {self._blobs.name} is another than the one of that name here")
        await asyncio.to_thread(self._known.put, path, manifest)
        return True

    def _digest(self, path: Path, wanted: LayerManifest) -> str:
        return manifest_of(path, wanted, self._settings.container.uid_base).digest()

    async def _bring(self, digest: str, layers: dict[str, LayerManifest], transfer: Transfer) -> None:
        manifest = layers[digest]
        if await self._lazy.can(digest, layers):
            try:
                await self._lazy.bring(self.path_of(digest, manifest), manifest)
                transfer.done_bytes += manifest.data_bytes  # as far as a start waits for it
                return
            except HostError as error:
                log.warning("a layer is fetched whole", layer=manifest.name, why=str(error))
        await self._fetch(digest, manifest, layers, transfer)

    async def _fetch(
        self, digest: str, manifest: LayerManifest, layers: dict[str, LayerManifest], transfer: Transfer
    ) -> None:
        path = self.path_of(digest, manifest)
        partial = path.with_name(path.name + _PARTIAL)
        try:
            with _told(path):
                await ended(_prepare, partial, manifest.size)
                with open(partial, "r+b", buffering=0) as file:  # noqa: ASYNC230 - it was made just now
                    await self._fill(file.fileno(), manifest, transfer)
                parent = layers[manifest.parents[0]].name if manifest.parents else None
                await ended(self._finish, partial, path, manifest, parent)
                await asyncio.to_thread(self._known.put, path, manifest)
        finally:
            await ended(_discard, partial)

    async def _fill(self, descriptor: int, manifest: LayerManifest, transfer: Transfer) -> None:
        async with asyncio.TaskGroup() as group:
            for offset, length, digest in manifest.chunks:
                await self._room.acquire()
                try:
                    task = group.create_task(self._one(descriptor, offset, length, digest, transfer))
                except BaseException:
                    self._room.release()
                    raise
                task.add_done_callback(lambda _: self._room.release())

    async def _one(self, descriptor: int, offset: int, length: int, digest: str, transfer: Transfer) -> None:
        try:
            stored = await self._blobs.get(chunk_key(digest), limit=length + (length >> 3) + 1024)
        except BlobMissing as error:
            raise BlobMissing(f"{self._blobs.name}: chunk {digest} is gone") from error
        data = await asyncio.to_thread(decode, stored, digest, length)
        await ended(_write, descriptor, offset, data)
        transfer.moved_bytes += len(stored)
        transfer.done_bytes += length

    def _finish(self, partial: Path, path: Path, manifest: LayerManifest, parent: str | None) -> None:
        """Everything came and is what it should be. Blocking."""
        if manifest.kind == "tree":
            self._unpack(partial, path)
            return
        target = path
        if manifest.kind == "delta":
            target = path.with_name(path.name + DELTA)
            with Delta(partial) as delta:
                delta.verify()
        partial.chmod(0o400)
        sync(partial)
        os.link(partial, target)  # unlike a rename, it does not replace
        try:
            needs = self._runtime.needs(path)
            if (needs.name if needs is not None else None) != parent:
                raise BlobDamaged(f"layer {path.name} needs {needs}, and its manifest says {parent}")
        except BaseException:
            target.unlink()
            raise
        sync(path.parent)

    def _unpack(self, partial: Path, path: Path) -> None:
        tree = path.with_name(f"{path.name}{_PARTIAL}.tree")
        try:
            with open(partial, "rb") as blob:
                uid_base, limit = self._settings.container.uid_base, self._settings.images.max_layer_mb << 20
                unpack_layer(blob, tree, uid_base, limit)
            os.sync()  # thousands of files: one by one takes longer
            tree.rename(path)
            sync(path.parent)
        except BadRequest as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from error
            raise BlobDamaged(f"layer {path.name}: {error}") from error

    def _check_room(self, needed: int) -> None:
        self._home.mkdir(mode=0o711, parents=True, exist_ok=True)
        check_room(self._home, needed, error=HostError)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What failed, out of the group it failed in; what the disk says, with the layer's name."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _named(path, _first(group)) from None
    except OSError as error:
        raise _named(path, error) from error


def _named(path: Path, error: BaseException) -> BaseException:
    if isinstance(error, OSError):
        return HostError(f"layer {path}: {error.strerror or error}", remedy="see whether its disk is full")
    return error


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _prepare(partial: Path, size: int) -> None:
    _discard(partial)  # of a process that was killed
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _write(descriptor: int, offset: int, data: bytes) -> None:
    """Zeros of a whole page are left out: the file has a hole there."""
    zero, view, at = bytes(_PAGE), memoryview(data), 0
    while at < len(view):
        begin = at
        while at < len(view) and view[at : at + _PAGE] != zero:
            at += _PAGE
        piece = view[begin:at]
        while piece:
            done = os.pwrite(descriptor, piece, offset + begin)
            piece, begin = piece[done:], begin + done
        while at < len(view) and view[at : at + _PAGE] == zero:
            at += _PAGE


def _discard(partial: Path) -> None:
    tree = partial.with_name(f"{partial.name}.tree")
    if os.path.lexists(tree):
        shutil.rmtree(tree)
    partial.unlink(missing_ok=True)
