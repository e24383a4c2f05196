"""Bring an image here: from the first source that has it, each layer once, checked by digest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from sandyard.config import Settings
from sandyard.errors import BadRequest, HostError, SandyardError
from sandyard.images.oci.archive import open_archive
from sandyard.images.oci.base import Source, SourceError, digest_of, parse_json, resolve
from sandyard.images.oci.downloads import downloading
from sandyard.images.oci.holds import Hold, hold
from sandyard.images.oci.layers import Layer, LayerStore
from sandyard.images.oci.manifest import Descriptor, ImageConfig, Manifest, default_platform, parse_config
from sandyard.images.oci.reference import Reference
from sandyard.images.oci.registry import Credentials, RegistrySource
from sandyard.images.oci.room import Collect, NoRoom, Room, Watermarks, collect_nothing
from sandyard.images.progress import Progress, silent
from sandyard.runtimes.finishing import ended

_AT_ONCE = 3
_CONFIG_LIMIT = 8 << 20
_TELL_BYTES = 4 << 20  # at least, between two lines about one layer


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose layers are here. `layers` the topmost first; `digest` of its manifest; `source`
    and `reference` for people."""

    reference: str
    digest: str
    source: str
    config: ImageConfig
    layers: Sequence[Layer]

    @property
    def trees(self) -> Sequence[Path]:
        return [layer.tree for layer in self.layers]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)


# What a registry is reached by; None: as any host is.
Transports = Callable[[str], httpx.AsyncBaseTransport | None]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a pull works with. `hold` keeps its layers until something names them; `collect` makes room for them;
    `owner` is the tenant it is for, None the node: see `LayerStore.find`."""

    hold: Hold
    collect: Collect = collect_nothing
    transports: Transports = lambda _registry: None
    owner: str | None = None


@contextlib.asynccontextmanager
async def needs(
    settings: Settings, collect: Collect = collect_nothing, transports: Transports = lambda _registry: None
) -> AsyncIterator[Needs]:
    """For the time until what is pulled has a name of its own. Raises `HostError`."""
    home = LayerStore(settings).home
    with contextlib.ExitStack() as stack:
        # In a thread: whoever removes layers has the guard, and may wait for this event loop.
        try:
            held = await ended(stack.enter_context, hold(home))
        except OSError as error:
            raise HostError(f"layer store {home}: {error}", remedy="check paths.state and its disk") from error
        yield Needs(held, collect, transports)


async def pull(settings: Settings, text: str, progress: Progress = silent, given: Needs | None = None) -> Image:
    """Pull an image by name, or take it from a file (`oci:PATH[:TAG]`, `oci-archive:` and
    `docker-archive:PATH[:TAG]`, each maybe with `@DIGEST`).

    Raises `BadRequest` for a bad name, one that is not allowed, or an image that is none, `NoRoom`, and
    `HostError` listing each candidate and why it failed. Without what is `given`, nothing keeps the layers."""
    if given is None:
        async with needs(settings) as given:
            return await pull(settings, text, progress, given)
    if (archive := _archive(text)) is not None:
        source = await asyncio.to_thread(open_archive, archive[0])
        try:
            return await _take(settings, source, archive[1], text, progress, given)
        finally:
            await source.close()
    reference = Reference.parse(text)
    failures: list[str] = []
    for registry, path in candidates(settings, reference):
        source = _registry(settings, registry, path, given.transports(registry))
        progress("pull", None, f"trying {source.name}")
        try:
            return await _take(settings, source, reference.version, str(reference), progress, given)
        except NoRoom:
            raise
        except SandyardError as error:  # what it has is no image, or it does not answer: the next may be better
            failures.append(error.message)
            progress("pull", None, error.message)
        finally:
            await source.close()
    raise HostError(
        f"image '{text}' could not be pulled: {'; '.join(failures)}",
        remedy="check the name, images.registries, images.mirrors and images.auth_file",
    )


def candidates(settings: Settings, reference: Reference) -> Sequence[tuple[str, str]]:
    """(registry, path) to try, in order: mirrors before what they mirror. Raises `BadRequest` where there
    is nothing to try, or nothing that is allowed."""
    images = settings.images
    if reference.registry is not None:
        named = [reference]
    else:
        named = [reference.within(registry) for registry in images.registries]
    if not named:
        raise BadRequest(
            f"image '{reference}' names no registry, and none is set to look in",
            field="image",
            remedy="write registry/name, or set images.registries",
        )
    allowed = [ref for ref in named if _allowed(images.allowed, ref)]
    if not allowed:
        raise BadRequest(
            f"image '{reference}' is not of a registry that is allowed here",
            field="image",
            remedy=f"images.allowed: {', '.join(images.allowed)}",
        )
    found: list[tuple[str, str]] = []
    for ref in allowed:
        assert ref.registry is not None  # `within` gave it one
        for mirror in images.mirrors.get(ref.registry, []):
            host, _, prefix = mirror.partition("/")
            found.append((host, f"{prefix}/{ref.path}" if prefix else ref.path))
        found.append((ref.registry, ref.path))
    return list(dict.fromkeys(found))


def _allowed(patterns: Sequence[str], reference: Reference) -> bool:
    name = f"{reference.registry}/{reference.path}"
    return not patterns or any(name == p or name.startswith(f"{p.rstrip('/')}/") for p in patterns)


def _archive(text: str) -> tuple[Path, str] | None:
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("oci", "docker-archive", "oci-archive"):
        return None
    rest, pinned, digest = rest.partition("@sha256:")
    path, tag = Path(rest).expanduser(), "latest"
    if not path.exists() and ":" in rest:
        name, _, tag = rest.rpartition(":")
        path = Path(name).expanduser()
    tag = f"sha256:{digest}" if pinned else tag
    if not path.exists():
        raise BadRequest(f"image '{text}': {path} does not exist", field="image")
    return path, tag


def _registry(settings: Settings, registry: str, path: str, transport: httpx.AsyncBaseTransport | None) -> Source:
    plain = registry in settings.images.plain_http
    known = Credentials.load(settings).of(registry)
    return RegistrySource(registry, path, known, plain_http=plain, transport=transport)


async def _take(
    settings: Settings, source: Source, version: str, reference: str, progress: Progress, given: Needs
) -> Image:
    platform = settings.images.platform or default_platform()
    digest, manifest = await resolve(source, version, platform)
    store = LayerStore(settings)
    room = Room(store.home, Watermarks.of(settings), given.hold, store.used_bytes, given.collect)
    with downloading(settings) as scratch:
        config = await _config(source, manifest, scratch)
        if len(config.diff_ids) != len(manifest.layers):
            raise BadRequest(
                f"{source.name}: {len(manifest.layers)} layers, and the configuration names {len(config.diff_ids)}"
            )
        work = _Layers(source, store, manifest.layers, config.diff_ids, scratch, progress, room, given)
        try:
            layers = await work.all()
        finally:
            await asyncio.to_thread(room.close)
    image = Image(reference, digest, source.name, config, list(reversed(layers)))
    progress("pull", 1.0, f"{reference}: {len(layers)} layers, {image.size_bytes >> 20} MiB, {digest}")
    return image


async def _config(source: Source, manifest: Manifest, scratch: Path) -> ImageConfig:
    if manifest.config.size > _CONFIG_LIMIT:
        raise BadRequest(f"{source.name}: a configuration of {manifest.config.size} bytes")
    path = scratch / "config"
    await source.fetch(manifest.config, path, lambda _count: None)
    data = await asyncio.to_thread(path.read_bytes)
    if digest_of(data) != manifest.config.digest:
        raise SourceError(f"{source.name}: the configuration is {digest_of(data)}, not {manifest.config.digest}")
    return parse_config(parse_json(data, source.name), source.name)


class _Layers:
    """Downloads a few at a time; unpacks from the bottom up, as each may need those below."""

    def __init__(
        self,
        source: Source,
        store: LayerStore,
        blobs: Sequence[Descriptor],
        diff_ids: Sequence[str],
        scratch: Path,
        progress: Progress,
        room: Room,
        given: Needs,
    ) -> None:
        self._source = source
        self._store = store
        self._blobs = blobs
        self._diff_ids = diff_ids
        self._scratch = scratch
        self._progress = progress
        self._room = room
        self._given = given
        self._total = sum(blob.size for blob in blobs) or 1
        self._come = [0] * len(blobs)
        self._said = [0] * len(blobs)
        self._gate = asyncio.Semaphore(_AT_ONCE)

    async def all(self) -> Sequence[Layer]:
        """The layers, the lowest first."""
        known = await asyncio.to_thread(self._known)
        downloads: Mapping[int, asyncio.Task[Path]] = {
            index: asyncio.create_task(self._download(index)) for index in range(len(self._blobs)) if index not in known
        }
        layers: list[Layer] = []
        try:
            for index in range(len(self._blobs)):
                layers.append(known[index] if index in known else await self._unpack(index, downloads[index], layers))
        finally:
            for task in downloads.values():
                task.cancel()
            await asyncio.gather(*downloads.values(), return_exceptions=True)
        return layers

    def _known(self) -> dict[int, Layer]:
        found = (
            (i, self._store.find(self._diff_ids[: i + 1], self._given.hold, self._given.owner))
            for i in range(len(self._blobs))
        )
        return {index: layer for index, layer in found if layer is not None}

    async def _download(self, index: int) -> Path:
        blob, path = self._blobs[index], self._scratch / str(index)
        async with self._gate:
            await asyncio.to_thread(self._room.take, blob.size)
            try:
                await self._source.fetch(blob, path, lambda count: self._count(index, count))
                digest = await asyncio.to_thread(_file_digest, path)
            except OSError as error:
                raise HostError(f"downloads {self._scratch}: {error.strerror}", remedy="check its disk") from error
        if digest != blob.digest:
            raise SourceError(f"{self._source.name}: layer {index + 1} is {digest}, not {blob.digest}")
        return path

    async def _unpack(self, index: int, download: asyncio.Task[Path], below: Sequence[Layer]) -> Layer:
        path = await download
        self._tell(index, "unpacking")
        written = 0

        def count(more: int) -> None:
            nonlocal written
            written += more
            self._room.take(more)

        def work() -> Layer:
            diff_ids, under = self._diff_ids[: index + 1], list(reversed(below))
            with path.open("rb") as blob:
                made = self._store.add(
                    blob, diff_ids, under, hold=self._given.hold, owner=self._given.owner, on_bytes=count
                )
            self._room.landed(made.disk_bytes)
            size = path.stat().st_size
            os.unlink(path)
            self._room.give(max(size + written - made.disk_bytes, 0))  # which counts as a layer by now
            self._room.check()
            return made

        try:
            return await ended(work)
        except HostError:
            raise
        except SandyardError as error:
            raise BadRequest(f"{self._source.name}: layer {index + 1}: {error}") from error

    def _count(self, index: int, count: int) -> None:
        """Now and then: what is told may be kept in a log of bounded length."""
        self._come[index] += count
        size, step = self._blobs[index].size, max(_TELL_BYTES, self._blobs[index].size // 50)
        if self._come[index] < size and 0 <= self._come[index] - self._said[index] < step:
            return
        self._said[index] = self._come[index]
        self._tell(index, f"{_mib(self._come[index])} of {_mib(self._blobs[index].size)} MiB")

    def _tell(self, index: int, what: str) -> None:
        part = min(sum(self._come) / self._total, 1.0)
        self._progress("pull", part * 0.9, f"layer {index + 1} of {len(self._blobs)}: {what}")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f}"


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
