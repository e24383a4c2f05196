"""One layer of an image, unpacked into a directory of its own, as overlayfs wants it.

A whiteout becomes a character device 0/0 and an opaque directory gets `trusted.overlay.opaque`. Only
the host's root can make either, so a layer cannot fake them: device nodes and `trusted.*` attributes
of the archive are dropped.

Most layers stand on their own. One that leaves out parent directories, or links to a file of a layer
below, means something else on other layers; what it needs of them is copied from `below`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import zstandard

from sandyard.errors import BadRequest
from sandyard.images.entries import StrangeEntry, entries
from sandyard.images.tarball import MAX_ENTRIES, Unpacker, check_disk, parts_of

OPAQUE = "trusted.overlay.opaque"
_WHITEOUT, _OPAQUE_MARK = ".wh.", ".wh..wh..opq"
_CHUNK = 1 << 20
_KEPT_ATTRIBUTES = ("user.",)
_PREFIX = "SCHILY.xattr."


@dataclass(frozen=True, slots=True)
class Unpacked:
    """`diff_id` of the tar as it came, `size_bytes` of file content, `self_contained` where nothing
    of the layers below was needed."""

    diff_id: str
    size_bytes: int
    self_contained: bool


def unpack_layer(
    blob: IO[bytes],
    root: Path,
    uid_base: int,
    max_bytes: int,
    below: Sequence[Path] = (),
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Unpacked:
    """Unpack a layer (tar, plain, gzip or zstd) into the new directory `root`.

    `below` are the unpacked layers under it, the topmost first; `on_bytes` hears of what is about to be written,
    and may raise. Blocking. Raises `BadRequest` naming the entry, and `HostError` where the disk fails; the caller
    removes `root`."""
    hashed = _Hashed(_decompressed(blob), max_bytes)
    try:
        root.mkdir(mode=0o755)
        with (
            tarfile.open(fileobj=cast("IO[bytes]", hashed), mode="r|", errorlevel=2, tarinfo=StrangeEntry) as tar,
            LayerUnpacker(root, uid_base, max_bytes, below, on_bytes) as unpacker,
        ):
            for member in entries(tar, MAX_ENTRIES):
                unpacker.add(member, tar)
        while hashed.read(_CHUNK):  # what follows the end mark belongs to the digest too
            pass
    except BadRequest:
        raise
    except OSError as error:
        check_disk(error, root)
        raise BadRequest(f"the layer is not a tar archive that can be unpacked: {error}") from error
    except (tarfile.TarError, EOFError, zstandard.ZstdError, zlib.error, OverflowError, ValueError) as error:
        raise BadRequest(f"the layer is not a tar archive that can be unpacked: {error}") from error
    return Unpacked(f"sha256:{hashed.digest.hexdigest()}", unpacker.written, unpacker.self_contained)


class LayerUnpacker(Unpacker):
    def __init__(
        self, root: Path, uid_base: int, max_bytes: int, below: Sequence[Path], on_bytes: Callable[[int], None]
    ) -> None:
        super().__init__(root, uid_base, on_bytes)
        self.self_contained = True
        self._max_bytes = max_bytes
        self._below = below
        self._made: set[tuple[str, ...]] = {()}

    def add(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        parts = parts_of(member.name)
        name = parts[-1] if parts else ""
        self._parents(parts[:-1], member.name)
        if name == _OPAQUE_MARK:
            self._make_opaque(parts[:-1], member.name)
        elif name.startswith(_WHITEOUT):
            self._whiteout(parts, name.removeprefix(_WHITEOUT), member.name)
        else:
            if not member.isdir() and self.written + max(member.size, 0) > self._max_bytes:
                raise BadRequest(f"entry {member.name!r} passes the limit of {self._max_bytes >> 20} MiB a layer")
            if member.islnk():
                self._fetch_target(member)
            replaced = member.isdir() and self._take_whiteout(parts, member.name)
            super().add(member, tar)
            if member.isdir():
                self._made.add(parts)
            if replaced:
                self._make_opaque(parts, member.name)
            if attributes := _attributes(member):
                self._set_attributes(parts, attributes, member.name)

    def _whiteout(self, parts: tuple[str, ...], name: str, entry: str) -> None:
        if name in ("", ".", "..") or "/" in name:
            raise BadRequest(f"entry {entry!r} whites out nothing")
        with self._walk(parts[:-1], make=False, name=entry) as parent:
            try:
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
                return
        # The same layer made it anew, and that wins whatever the order: of a directory nothing below shows.
        if stat.S_ISDIR(found.st_mode):
            self._make_opaque((*parts[:-1], name), entry)

    def _take_whiteout(self, parts: tuple[str, ...], entry: str) -> bool:
        """Remove the whiteout where a directory is to be; whether there was one."""
        if not parts:
            return False
        with self._walk(parts[:-1], make=False, name=entry) as parent:
            try:
                if not stat.S_ISCHR(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
                    return False
            except FileNotFoundError:
                return False
            os.unlink(parts[-1], dir_fd=parent)
        return True

    def _make_opaque(self, parts: tuple[str, ...], entry: str) -> None:
        with self._walk(parts, make=False, name=entry) as fd:
            os.setxattr(fd, OPAQUE, b"y")

    def _parents(self, parts: tuple[str, ...], entry: str) -> None:
        """Make directories the archive left out as the layers below have them: the overlay shows the topmost."""
        for depth in range(1, len(parts) + 1):
            part = parts[:depth]
            if part in self._made:
                continue
            self._made.add(part)
            replaced = self._take_whiteout(part, entry)
            with self._walk(part[:-1], make=False, name=entry) as parent:
                try:
                    os.mkdir(part[-1], 0o755, dir_fd=parent)
                except FileExistsError:
                    continue
            if replaced:
                self._make_opaque(part, entry)
            self.self_contained = False
            with self._walk(part, make=False, name=entry) as fd:
                known = next((found for layer in self._below if (found := _directory(layer, part)) is not None), None)
                os.chown(fd, *(known[1:] if known else (self._base, self._base)))
                os.chmod(fd, known[0] if known else 0o755)

    def _fetch_target(self, member: tarfile.TarInfo) -> None:
        """A hard link to a file of a lower layer: the file is copied up, as a writing container would."""
        target = parts_of(member.linkname)
        if not target:
            return  # refused by the caller, by name
        self._parents(target[:-1], member.name)
        with self._walk(target[:-1], make=False, name=member.name) as parent:
            try:
                os.stat(target[-1], dir_fd=parent, follow_symlinks=False)
                return
            except FileNotFoundError:
                pass
            self.self_contained = False
            for layer in self._below:
                if _copy_up(layer, target, parent, self._grow):
                    return

    def _grow(self, count: int) -> None:
        """What is copied up is written like any other content."""
        if self.written + count > self._max_bytes:
            raise BadRequest(f"links to files of lower layers pass the limit of {self._max_bytes >> 20} MiB a layer")
        self._on_bytes(count)
        self.written += count

    def _set_attributes(self, parts: tuple[str, ...], attributes: dict[str, bytes], entry: str) -> None:
        with self._walk(parts[:-1], make=False, name=entry) as parent:
            path = f"/proc/self/fd/{parent}/{parts[-1]}" if parts else f"/proc/self/fd/{parent}"
            for name, value in attributes.items():
                os.setxattr(path, name, value, follow_symlinks=False)


def _attributes(member: tarfile.TarInfo) -> dict[str, bytes]:
    """Extended attributes a sandbox may have. File capabilities are set with the file itself."""
    if member.issym():
        return {}
    return {
        key.removeprefix(_PREFIX): value.encode("utf-8", "surrogateescape")
        for key, value in member.pax_headers.items()
        if key.startswith(_PREFIX) and key.removeprefix(_PREFIX).startswith(_KEPT_ATTRIBUTES)
    }


def _directory(layer: Path, parts: tuple[str, ...]) -> tuple[int, int, int] | None:
    """(mode, uid, gid) of a directory in an unpacked layer; None where there is none."""
    with _opened(layer, parts[:-1]) as parent:
        if parent is None:
            return None
        try:
            found = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return None
    return (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) if stat.S_ISDIR(found.st_mode) else None


def _copy_up(layer: Path, parts: tuple[str, ...], parent: int, grow: Callable[[int], None]) -> bool:
    with _opened(layer, parts[:-1]) as folder:
        if folder is None:
            return False
        try:
            source = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        except OSError:
            return False  # not in this layer, or not a file
        with os.fdopen(source, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return False
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(parts[-1], flags, 0o600, dir_fd=parent), "wb") as target:
                while chunk := file.read(_CHUNK):
                    grow(len(chunk))
                    target.write(chunk)
                os.fchown(target.fileno(), found.st_uid, found.st_gid)
                os.fchmod(target.fileno(), stat.S_IMODE(found.st_mode))
                target.flush()
                os.utime(target.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
    return True


@contextmanager
def _opened(root: Path, parts: tuple[str, ...]) -> Iterator[int | None]:
    """Descend into an unpacked layer without following a symlink; None where that leads nowhere."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd: int | None = os.open(root, flags)
    try:
        for part in parts:
            try:
                below: int | None = os.open(part, flags, dir_fd=fd)
            except OSError:
                below = None  # not a directory of this layer
            os.close(cast(int, fd))
            fd = below
            if fd is None:
                break
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


class _Hashed(io.RawIOBase):
    """Reads through, hashing, and refuses more than `limit` bytes: a small file can unpack to anything."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source = source
        self._left = limit + (limit >> 2) + (64 << 20)  # headers come on top of what the files hold
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise BadRequest("the layer unpacks to more than the limit (images.max_layer_mb)")
        self.digest.update(data)
        return data


def _decompressed(blob: IO[bytes]) -> IO[bytes]:
    """By the first bytes, not by the media type: registries have been seen to be wrong about it."""
    start = blob.read(4)
    blob.seek(0)
    if start[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=blob))
    if start == b"\x28\xb5\x2f\xfd":
        return cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True))
    return blob
