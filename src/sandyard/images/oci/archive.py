"""Images in files: an OCI layout (a directory, or a tar of one) and what `docker save` writes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sandyard.errors import BadRequest
from sandyard.images.oci.base import MANIFEST_LIMIT, OnBytes, Source, SourceError, digest_of, parse_json
from sandyard.images.oci.manifest import DOCKER_MANIFEST, OCI_INDEX, Descriptor

_REF_NAME = "org.opencontainers.image.ref.name"
_CHUNK = 1 << 20


def open_archive(path: Path) -> Source:
    """The source for a directory or a tar file. Raises `BadRequest` where it is neither kind."""
    files: _Files = _Directory(path) if path.is_dir() else _Tar(path)
    if files.has("manifest.json") and not files.has("index.json"):
        return DockerArchive(path, files)
    if files.has("index.json"):
        return OciLayout(path, files)
    raise BadRequest(f"{path}: neither an OCI layout (index.json) nor a docker archive (manifest.json)")


class _Files:
    """The files of an archive by name."""

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def open(self, name: str) -> IO[bytes]:
        """Raises `KeyError`."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Bytes of a file. Raises `KeyError`."""
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read(MANIFEST_LIMIT)

    def close(self) -> None: ...


class _Directory(_Files):
    def __init__(self, root: Path) -> None:
        self._root = root

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def open(self, name: str) -> IO[bytes]:
        try:
            return (self._root / name).open("rb")
        except FileNotFoundError as error:
            raise KeyError(name) from error

    def size(self, name: str) -> int:
        return (self._root / name).stat().st_size if self.has(name) else 0


class _Tar(_Files):
    """Read in place: nothing is unpacked."""

    def __init__(self, path: Path) -> None:
        try:
            self._tar = tarfile.open(path, "r:*")  # noqa: SIM115 - closed by `close`
            self._members = {member.name.removeprefix("./"): member for member in self._tar}
        except (OSError, tarfile.TarError, EOFError) as error:
            raise BadRequest(f"{path} is not a tar archive that can be read: {error}") from error

    def has(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> IO[bytes]:
        file = self._tar.extractfile(self._member(name))
        if file is None:
            raise KeyError(name)
        return file

    def size(self, name: str) -> int:
        return self._member(name).size

    def _member(self, name: str) -> tarfile.TarInfo:
        member = self._members[name]
        for _ in range(8):  # docker save writes a repeated layer as a symlink to the first
            if not member.issym():
                break
            member = self._members[os.path.normpath(Path(member.name).parent / member.linkname)]
        return member

    def close(self) -> None:
        self._tar.close()


class _FileSource(Source):
    def __init__(self, path: Path, files: _Files) -> None:
        self.name = str(path)
        self._files = files
        self._reading = asyncio.Lock()  # a tar is one open file

    def _blob_name(self, digest: str) -> str:
        raise NotImplementedError

    async def fetch(self, blob: Descriptor, target: Path, on_bytes: OnBytes) -> None:
        def copy() -> None:
            with self._files.open(self._blob_name(blob.digest)) as file, target.open("xb") as out:
                shutil.copyfileobj(file, out, _CHUNK)

        try:
            async with self._reading:
                await asyncio.to_thread(copy)
        except (KeyError, OSError, tarfile.TarError, EOFError) as error:
            raise SourceError(f"{self.name}: blob {blob.digest}: {error}") from error
        on_bytes(blob.size)

    async def close(self) -> None:
        self._files.close()


class OciLayout(_FileSource):
    """OCI image layout: `index.json`, and blobs by digest."""

    async def manifest(self, version: str) -> bytes:
        if version.startswith("sha256:"):
            try:
                return self._files.read(self._blob_name(version))
            except KeyError as error:
                raise SourceError(f"{self.name}: no manifest {version}") from error
        document = parse_json(self._files.read("index.json"), self.name)
        entries = document.get("manifests") or []
        named = [e for e in entries if (e.get("annotations") or {}).get(_REF_NAME, "").rpartition(":")[2] == version]
        if not named and version == "latest":
            named = entries  # nobody asked for a tag: then the only image, or the platform's
        if not named:
            tags = [(e.get("annotations") or {}).get(_REF_NAME) for e in entries]
            has = ", ".join(tag for tag in tags if tag) or "none"
            raise SourceError(f"{self.name}: no image '{version}'", remedy=f"its names: {has}")
        return json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": named}).encode()

    def _blob_name(self, digest: str) -> str:
        algorithm, _, value = digest.partition(":")
        return f"blobs/{algorithm}/{value}"


class DockerArchive(_FileSource):
    """`docker save`: `manifest.json` names a configuration and tar files of layers. It has no digests
    of its own for them, so they are given the ones that the configuration demands."""

    def __init__(self, path: Path, files: _Files) -> None:
        super().__init__(path, files)
        try:
            self._images: Sequence[Mapping[str, Any]] = json.loads(files.read("manifest.json"))
        except ValueError as error:
            raise BadRequest(f"{path}: manifest.json: {error}") from error
        self._names: dict[str, str] = {}

    async def manifest(self, version: str) -> bytes:
        image = self._image(version)
        try:
            config = self._files.read(image["Config"])
            layers = list(image["Layers"])
            diff_ids = parse_json(config, self.name)["rootfs"]["diff_ids"]
        except (KeyError, TypeError) as error:
            raise BadRequest(f"{self.name}: manifest.json names {error}, which is not there") from error
        missing = [name for name in layers if not self._files.has(name)]
        if missing:
            raise BadRequest(f"{self.name}: manifest.json names {missing[0]}, which is not there")
        if len(diff_ids) != len(layers):
            raise BadRequest(f"{self.name}: {len(layers)} layers, and the configuration names {len(diff_ids)}")
        self._names = dict(zip(diff_ids, layers, strict=True)) | {digest_of(config): image["Config"]}
        document = {
            "schemaVersion": 2,
            "mediaType": DOCKER_MANIFEST,
            "config": {"digest": digest_of(config), "size": len(config)},
            "layers": [
                {"digest": diff_id, "size": self._files.size(name)}
                for diff_id, name in zip(diff_ids, layers, strict=True)
            ],
        }
        return json.dumps(document).encode()

    def _image(self, version: str) -> Mapping[str, Any]:
        if version == "latest" and len(self._images) == 1:
            return self._images[0]
        for image in self._images:
            if any(name.rpartition(":")[2] == version or name == version for name in image.get("RepoTags") or []):
                return image
        names = [name for image in self._images for name in image.get("RepoTags") or []]
        raise SourceError(f"{self.name}: no image '{version}'", remedy=f"its names: {', '.join(names) or 'none'}")

    def _blob_name(self, digest: str) -> str:
        return self._names[digest]
