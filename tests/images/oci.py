"""Small images made by hand, and a real registry to push them to."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sandyard.images.oci.base import MemorySource, digest_of
from sandyard.images.oci.manifest import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass
class Entry:
    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    link: str = ""
    attributes: Mapping[str, bytes] = field(default_factory=dict)


def folder(name: str, mode: int = 0o755, uid: int = 0) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, mode=mode, uid=uid, gid=uid)


def layer(*entries: Entry) -> bytes:
    """A layer's tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.mode, info.uid, info.gid = entry.kind, entry.mode, entry.uid, entry.gid
            info.linkname, info.size, info.mtime = entry.link, len(entry.data), 1_700_000_000
            info.pax_headers = {
                f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape")
                for name, value in entry.attributes.items()
            }
            tar.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


@dataclass
class HandMade:
    """An image as blobs by digest; `manifest` is the digest of its manifest."""

    blobs: dict[str, bytes]
    manifest: str
    layers: list[str]
    diff_ids: list[str]

    def source(self, **tags: str) -> MemorySource:
        return MemorySource(self.blobs, tags or {"latest": self.manifest})


def image(layers: Sequence[bytes], *, plain: bool = False, **config: Any) -> HandMade:
    blobs: dict[str, bytes] = {}

    def keep(data: bytes) -> str:
        blobs[digest_of(data)] = data
        return digest_of(data)

    packed = [data if plain else gzip.compress(data, mtime=0) for data in layers]
    digests = [keep(data) for data in packed]
    diff_ids = [digest_of(data) for data in layers]
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    settings = json.dumps(document).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": keep(settings),
            "size": len(settings),
        },
        "layers": [
            {"mediaType": LAYER_TYPE, "digest": digest, "size": len(data)}
            for digest, data in zip(digests, packed, strict=True)
        ],
    }
    return HandMade(blobs, keep(json.dumps(manifest).encode()), digests, diff_ids)


def index(entries: Mapping[str, HandMade]) -> HandMade:
    """An index of images by platform ("linux/amd64")."""
    blobs: dict[str, bytes] = {}
    manifests = []
    for platform, made in entries.items():
        blobs |= made.blobs
        system, architecture = platform.split("/")
        manifests.append(
            {
                "mediaType": OCI_MANIFEST,
                "digest": made.manifest,
                "size": len(made.blobs[made.manifest]),
                "platform": {"os": system, "architecture": architecture},
            }
        )
    data = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": manifests}).encode()
    blobs[digest_of(data)] = data
    return HandMade(blobs, digest_of(data), [], [])


def write_layout(root: Path, made: HandMade, tag: str = "latest") -> Path:
    """An OCI layout in a directory."""
    (root / "blobs" / "sha256").mkdir(parents=True)
    for digest, data in made.blobs.items():
        (root / "blobs" / "sha256" / digest.partition(":")[2]).write_bytes(data)
    entry = {
        "mediaType": OCI_MANIFEST,
        "digest": made.manifest,
        "size": len(made.blobs[made.manifest]),
        "annotations": {"org.opencontainers.image.ref.name": tag},
    }
    (root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (root / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return root


def write_docker_archive(path: Path, layers: Sequence[bytes], tag: str = "a:b", **config: Any) -> Path:
    """What `docker save` writes."""
    document = {"config": config, "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in layers]}}
    settings = json.dumps(document).encode()
    name = f"{hashlib.sha256(settings).hexdigest()}.json"
    files = {name: settings, **{f"{number}/layer.tar": data for number, data in enumerate(layers)}}
    described = [{"Config": name, "RepoTags": [tag], "Layers": [f"{n}/layer.tar" for n in range(len(layers))]}]
    files["manifest.json"] = json.dumps(described).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


class Registry:
    """Debian's `docker-registry` on loopback."""

    def __init__(self, address: str, root: Path, auth: tuple[str, str] | None = None) -> None:
        self.address = address
        self.root = root
        self._auth = auth

    def push(self, name: str, made: HandMade, tag: str = "latest") -> None:
        with httpx.Client(base_url=f"http://{self.address}", auth=self._auth) as client:
            manifests = []
            for digest, data in made.blobs.items():
                document = _document(data)
                if document.get("mediaType") in (OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST):
                    manifests.append((digest, data, document["mediaType"]))
                    continue
                place = client.post(f"/v2/{name}/blobs/uploads/").raise_for_status().headers["location"]
                client.put(httpx.URL(place).copy_merge_params({"digest": digest}), content=data).raise_for_status()
            manifests.sort(key=lambda entry: entry[2] == OCI_INDEX)  # an index names what must be there already
            for digest, data, kind in manifests:
                version = tag if digest == made.manifest else digest
                put = client.put(f"/v2/{name}/manifests/{version}", content=data, headers={"content-type": kind})
                put.raise_for_status()

    def blob_file(self, digest: str) -> Path:
        """Where the registry keeps a blob, for tests that damage it."""
        value = digest.partition(":")[2]
        return self.root / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"


def _document(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def have_registry() -> bool:
    return shutil.which("docker-registry") is not None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


USER, PASSWORD = "reader", "secret"
# bcrypt of PASSWORD, the only kind that the registry takes
_HTPASSWD = "reader:$2b$05$h1ZlBQNqgYVXyLxTVtXvvOSMdGoilNyczGmg9Ri6tNSTjXTKoD59."


@contextmanager
def running_registry(folder: Path, *, password: bool = False) -> Iterator[Registry]:
    root, address = folder / "data", f"127.0.0.1:{free_port()}"
    root.mkdir(parents=True)
    environ = {
        **os.environ,
        "REGISTRY_HTTP_ADDR": address,
        "REGISTRY_STORAGE_FILESYSTEM_ROOTDIRECTORY": str(root),
        "REGISTRY_LOG_LEVEL": "error",
        "OTEL_TRACES_EXPORTER": "none",
    }
    lines = ["version: 0.1", "storage: {filesystem: {rootdirectory: /nowhere}}", "http: {addr: 127.0.0.1:1}"]
    if password:
        (folder / "htpasswd").write_text(_HTPASSWD + "\n")
        lines.append(f"auth: {{htpasswd: {{realm: test, path: {folder / 'htpasswd'}}}}}")
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")], env=environ, stdout=log, stderr=log
        )
    try:
        _until_it_answers(address, process, folder / "log")
        yield Registry(address, root, (USER, PASSWORD) if password else None)
    finally:
        process.terminate()
        process.wait(10)


def _until_it_answers(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            if httpx.get(f"http://{address}/v2/").status_code in (200, 401):
                return
        except httpx.HTTPError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, "the registry does not answer"
        time.sleep(0.05)
