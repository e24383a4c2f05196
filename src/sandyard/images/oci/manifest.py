"""Manifests and image configurations, of OCI and of Docker, and the choice of a platform."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sandyard.errors import BadRequest

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
ACCEPTED = (OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_BYTES = 1 << 44
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob by what it holds. `size` in bytes; `media_type` tells how a layer is packed."""

    digest: str
    size: int
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about how it is run. `diff_ids` of its layers, the lowest first."""

    diff_ids: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    user: str | None = None
    entrypoint: Sequence[str] = ()
    command: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[str] = ()
    volumes: Sequence[str] = ()
    shell: Sequence[str] = ()
    healthcheck: Mapping[str, Any] | None = None
    stop_signal: str | None = None
    on_build: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Descriptor
    layers: Sequence[Descriptor]  # the lowest first


def default_platform() -> str:
    machine = host.machine()
    return f"linux/{_ARCHITECTURES.get(machine, machine)}"


def parse_descriptor(value: Any, what: str) -> Descriptor:
    """Raises `BadRequest` naming `what`."""
    if not isinstance(value, dict) or not isinstance(value.get("digest"), str):
        raise BadRequest(f"{what}: a descriptor without a digest")
    digest, size = value["digest"], value.get("size", 0)
    if not _DIGEST.fullmatch(digest) or type(size) is not int or not 0 <= size <= _MOST_BYTES:
        raise BadRequest(f"{what}: descriptor {digest!r} of size {size!r} is not one of sha256")
    return Descriptor(digest, size, str(value.get("mediaType", "")))


def is_index(document: Mapping[str, Any]) -> bool:
    return "manifests" in document


def choose(document: Mapping[str, Any], platform: str, what: str) -> Descriptor:
    """The manifest of `platform` ("linux/amd64", "linux/arm64/v8") in an index. Raises `BadRequest`
    listing the platforms there are."""
    with _well_formed(what):
        return _choose(document, platform, what)


def _choose(document: Mapping[str, Any], platform: str, what: str) -> Descriptor:
    wanted = platform.split("/")
    offered: list[str] = []
    for entry in document["manifests"]:
        has = entry.get("platform") or {}
        parts = [str(has.get("os", "")), str(has.get("architecture", ""))]
        if variant := has.get("variant"):
            parts.append(str(variant))
        if parts[: len(wanted)] == wanted:
            return parse_descriptor(entry, what)
        offered.append("/".join(parts))
    if len(document["manifests"]) == 1 and not document["manifests"][0].get("platform"):
        return parse_descriptor(document["manifests"][0], what)  # a layout of one image need not say it
    raise BadRequest(f"{what}: no image for {platform}", remedy=f"it has: {', '.join(offered) or 'none'}")


def parse_manifest(document: Mapping[str, Any], what: str) -> Manifest:
    """Raises `BadRequest`, also for the old schema 1."""
    if document.get("schemaVersion") != 2 or not isinstance(document.get("layers"), list):
        raise BadRequest(f"{what}: not a manifest of schema 2 (OCI or Docker)")
    layers = [parse_descriptor(layer, what) for layer in document["layers"]]
    return Manifest(parse_descriptor(document.get("config"), what), layers)


def parse_config(document: Mapping[str, Any], what: str) -> ImageConfig:
    """Raises `BadRequest` where the layers are not named by their digests, or anything is not of its type."""
    with _well_formed(what):
        return _parse_config(document, what)


def _parse_config(document: Mapping[str, Any], what: str) -> ImageConfig:
    rootfs = document.get("rootfs") or {}
    diff_ids = rootfs.get("diff_ids")
    if not isinstance(diff_ids, list) or not all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in diff_ids):
        raise BadRequest(f"{what}: its configuration does not name its layers")
    config = document.get("config") or {}
    env = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    return ImageConfig(
        diff_ids=diff_ids,
        env=env,
        workdir=config.get("WorkingDir") or None,
        user=config.get("User") or None,
        entrypoint=config.get("Entrypoint") or (),
        command=config.get("Cmd") or (),
        labels=config.get("Labels") or {},
        ports=sorted(config.get("ExposedPorts") or {}),
        volumes=sorted(config.get("Volumes") or {}),
        shell=config.get("Shell") or (),
        healthcheck=config.get("Healthcheck"),
        stop_signal=config.get("StopSignal") or None,
        on_build=config.get("OnBuild") or (),
    )


@contextmanager
def _well_formed(what: str) -> Iterator[None]:
    """What a stranger wrote may have anything anywhere."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise BadRequest(f"{what}: not an image: {error}") from error
