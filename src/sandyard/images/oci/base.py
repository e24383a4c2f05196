"""Where images come from: the contract of a source, and its in-memory twin."""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandyard.errors import BadRequest, HostError
from sandyard.images.oci.manifest import Descriptor, Manifest, choose, is_index, parse_manifest

MANIFEST_LIMIT = 4 << 20
OnBytes = Callable[[int], None]  # how many more bytes of a blob have come


class SourceError(HostError):
    """A source did not give what it was asked for; another may."""


class Source(ABC):
    """One place that has an image. Everything that comes from it is checked against its digest by
    whoever asked. Every method may raise `SourceError`."""

    name: str  # for people: where this is

    @abstractmethod
    async def manifest(self, version: str) -> bytes:
        """The manifest or index of a tag, or of a digest."""

    @abstractmethod
    async def fetch(self, blob: Descriptor, target: Path, on_bytes: OnBytes) -> None:
        """Write a blob to the new file `target`, unpacked or packed as the source has it."""

    async def close(self) -> None:  # noqa: B027 - most sources hold nothing
        """Release what the source holds. Idempotent."""


class MemorySource(Source):
    """Blobs by digest and manifests by tag, for tests."""

    def __init__(self, blobs: Mapping[str, bytes], tags: Mapping[str, str], name: str = "memory") -> None:
        self.name = name
        self.blobs = dict(blobs)
        self.tags = dict(tags)

    async def manifest(self, version: str) -> bytes:
        digest = self.tags.get(version, version)
        if digest not in self.blobs:
            raise SourceError(f"no manifest of '{version}'")
        return self.blobs[digest]

    async def fetch(self, blob: Descriptor, target: Path, on_bytes: OnBytes) -> None:
        if blob.digest not in self.blobs:
            raise SourceError(f"no blob {blob.digest}")
        data = self.blobs[blob.digest]
        await asyncio.to_thread(target.write_bytes, data)
        on_bytes(len(data))


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Raises `BadRequest`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{what}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"{what}: not a JSON object")
    return value


async def resolve(source: Source, version: str, platform: str) -> tuple[str, Manifest]:
    """The digest and the manifest of one platform's image, each step checked against its digest.

    Raises `SourceError` where the source has something else, `BadRequest` for what is no image."""
    data = await source.manifest(version)
    wanted = version if version.startswith("sha256:") else None
    digest = _checked(data, wanted, source.name)
    document = parse_json(data, source.name)
    if is_index(document):
        chosen = choose(document, platform, source.name)
        data = await source.manifest(chosen.digest)
        digest = _checked(data, chosen.digest, source.name)
        document = parse_json(data, source.name)
    return digest, parse_manifest(document, source.name)


def _checked(data: bytes, wanted: str | None, where: str) -> str:
    digest = digest_of(data)
    if wanted is not None and digest != wanted:
        raise SourceError(f"{where}: the manifest is {digest}, not {wanted} as asked for")
    return digest
