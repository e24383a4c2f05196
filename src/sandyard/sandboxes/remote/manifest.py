"""What is written about a layer and about a snapshot in blob storage: canonical JSON, so that the same thing is the
same bytes.

`layers/<sha256>` is one layer, under the digest of its own text; it names its chunks, and the layers that it is kept as
the difference to. `snapshots/<tenant>/<template>/<build>` is one snapshot, and carries its own digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from sandyard.store.blobs import BlobDamaged

FORMAT = 1
MAX_CHUNK = 64 << 20
LAYERS, SNAPSHOTS, CHUNKS = "layers", "snapshots", "chunks"
_STRICT = ConfigDict(extra="forbid", strict=True)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z2-7]{20}")
_PLAIN_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")

Kind = Literal["file", "delta", "tree"]


@checked(config=_STRICT, frozen=True, slots=True)
class LayerManifest:
    """`file`: a layer as it is, which a runtime wrote under `name`; `delta`: what makes it of another; `tree`: a
    directory as a layer's tar, named by its manifest.

    `parents`: the one layer it cannot be without, if any. `size`: bytes of the whole; where no chunk is, it is zero.
    Chunks are [offset, length, SHA-256], ascending, each of `chunk_bytes` at most."""

    kind: Kind
    name: str
    size: int
    chunk_bytes: int
    parents: list[str]
    chunks: list[tuple[int, int, str]]
    format: int = FORMAT

    @property
    def data_bytes(self) -> int:
        return sum(length for _, length, _ in self.chunks)

    def text(self) -> bytes:
        return _canonical(asdict(self))

    def digest(self) -> str:
        return hashlib.sha256(self.text()).hexdigest()

    @classmethod
    def parse(cls, text: bytes, digest: str) -> LayerManifest:
        """Raises `BlobDamaged`."""
        if hashlib.sha256(text).hexdigest() != digest:
            raise BlobDamaged(f"layer {digest} is not what was stored")
        made = _parsed(TypeAdapter(cls), json_of(text, f"layer {digest}"), f"layer {digest}")
        made.check(f"layer {digest}")
        return made

    def check(self, what: str) -> None:
        """Raises `BlobDamaged` for what no node of ours writes."""
        end = 0
        for offset, length, digest in self.chunks:
            if offset < end or not 0 < length <= self.chunk_bytes <= MAX_CHUNK or not _DIGEST.fullmatch(digest):
                raise BlobDamaged(f"{what}: its chunks are out of order, empty or without a name")
            end = offset + length
        if end > self.size or self.format != FORMAT:
            raise BlobDamaged(f"{what}: its chunks pass its end, or it is of a later version")
        if not all(_DIGEST.fullmatch(parent) for parent in self.parents):
            raise BlobDamaged(f"{what}: its parents have no names")
        if len(self.parents) > (self.kind != "tree") or (self.kind == "delta" and not self.parents):
            raise BlobDamaged(f"{what}: a {self.kind} on {len(self.parents)} layers")
        if not _NAME.fullmatch(self.name) and not (self.kind == "tree" and not self.name):
            raise BlobDamaged(f"{what}: '{self.name}' is no name of a layer")


def layer_key(digest: str) -> str:
    return f"{LAYERS}/{digest}"


def tree_name(digest: str) -> str:
    """What the directory of a tree is called on a node that fetched it."""
    return base64.b32encode(bytes.fromhex(digest))[:20].decode().lower()


@checked(config=_STRICT, frozen=True, slots=True)
class SnapshotManifest:
    """`layers` by the digests of their manifests, the topmost first. Times are seconds since the epoch."""

    tenant: str
    template_id: str
    build_id: str
    names: list[str]
    tag: str
    source: str | None
    created_at: float
    size_bytes: int
    runtime: str
    layers: list[str]
    env: dict[str, str]
    workdir: str | None
    user: str | None
    config: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def id(self) -> str:
        return f"{self.names[0] if self.names else self.template_id}:{self.tag}"

    @property
    def key(self) -> str:
        return f"{folder_of(self.tenant)}/{self.template_id}/{self.build_id}"

    def text(self) -> bytes:
        inner = asdict(self)
        return _canonical({"sha256": hashlib.sha256(_canonical(inner)).hexdigest(), "snapshot": inner})

    @classmethod
    def parse(cls, text: bytes, key: str) -> SnapshotManifest:
        """Raises `BlobDamaged`, also for one that lies under another's name."""
        outer = json_of(text, key)
        inner = outer.get("snapshot")
        if not isinstance(inner, dict) or hashlib.sha256(_canonical(inner)).hexdigest() != outer.get("sha256"):
            raise BlobDamaged(f"{key} is not what was stored")
        made = _parsed(TypeAdapter(cls), inner, key)
        if made.format != FORMAT or not _ID.fullmatch(made.template_id) or not _ID.fullmatch(made.build_id):
            raise BlobDamaged(f"{key} is of a later version, or names nothing")
        if made.key != key:
            raise BlobDamaged(f"{key} is {made.key} under a name that is not its own")
        if not made.layers or not all(_DIGEST.fullmatch(layer) for layer in made.layers):
            raise BlobDamaged(f"{key}: its layers have no names")
        return made


def is_id(text: str) -> bool:
    """Whether it can be a template's id or a build's."""
    return _ID.fullmatch(text) is not None


def is_new_id(text: str) -> bool:
    """Whether it is of the form that nodes give ids, and people hardly ever names."""
    return _NAME.fullmatch(text) is not None


def folder_of(tenant: str) -> str:
    """Where the snapshots of a tenant are, and nobody else's."""
    if _PLAIN_TENANT.fullmatch(tenant):
        return f"{SNAPSHOTS}/t-{tenant}"
    return f"{SNAPSHOTS}/h-{hashlib.sha256(tenant.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot in the storage; `here`: this node has this state of it."""

    manifest: SnapshotManifest
    here: bool


_T = TypeVar("_T")


def _parsed(adapter: TypeAdapter[_T], value: Mapping[str, Any], what: str) -> _T:
    try:
        # Tuples and numbers come as JSON has them.
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        raise BlobDamaged(f"{what}: {error.errors()[0]['msg']}") from error


def json_of(text: bytes, what: str) -> dict[str, Any]:
    """Raises `BlobDamaged` for what is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BlobDamaged(f"{what} is not what was stored: {error}") from error
    if not isinstance(value, dict):
        raise BlobDamaged(f"{what} is not what was stored")
    return value


def _canonical(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
