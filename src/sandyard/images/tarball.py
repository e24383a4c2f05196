"""Unpack a root file system's tar archive as root, without trusting a byte of it.

Every entry is reached through directory descriptors, one name at a time, never through a symlink;
a name that is absolute, climbs with `..` or passes through a symlink is refused, and so is the
archive. Owners are shifted on the way (see `owners`).
"""

from __future__ import annotations

import errno
import os
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from sandyard.errors import BadRequest, HostError
from sandyard.images.entries import StrangeEntry, entries
from sandyard.images.owners import CAPABILITY, bind_capability, shifted

MAX_ENTRIES = 2_000_000
_DEEPEST, _LONGEST = 200, 4096  # what walks a tree calls itself for each level; PATH_MAX
_CHUNK = 1 << 20
_BLOCK = 4096  # what a file system takes for an entry, about
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_ENOUGH_DIRECTORIES = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def unpack(archive: Path, root: Path, uid_base: int, on_bytes: Callable[[int], None] = lambda count: None) -> int:
    """Unpack `archive` (tar, plain or gzip, bzip2, xz) into the new directory `root`; return its bytes.

    Blocking. `on_bytes` hears how much of the content is written. Raises `BadRequest` naming the
    archive and the entry; the caller removes `root`.
    """
    try:
        with tarfile.open(archive, "r|*", tarinfo=StrangeEntry) as tar:
            root.mkdir(mode=0o755)
            with Unpacker(root, uid_base) as unpacker:
                for member in entries(tar, MAX_ENTRIES):
                    unpacker.add(member, tar)
                    on_bytes(unpacker.written)
            return unpacker.written
    except BadRequest as error:
        raise BadRequest(f"archive {archive}: {error}") from error
    except (tarfile.TarError, EOFError, OverflowError, ValueError) as error:
        raise BadRequest(
            f"{archive} is not a tar archive that can be read: {error}",
            remedy="give a .tar, .tar.gz, .tar.bz2 or .tar.xz",
        ) from error
    except OSError as error:
        check_disk(error, root)
        raise BadRequest(f"archive {archive}: {error}") from error


def check_disk(error: OSError, root: Path) -> None:
    """Raises `HostError` where it is the disk below `root` that failed, and not what was to be written."""
    if error.errno in _DISK:
        raise HostError(f"disk of {root.parent}: {error.strerror}", remedy="free some, or set paths.state") from error


class Unpacker:
    """Writes entries below `root`. Directory modes are set at the end, so that files fit in."""

    def __init__(self, root: Path, uid_base: int, on_bytes: Callable[[int], None] = lambda count: None) -> None:
        """`on_bytes` hears of bytes that are about to be written, and may raise."""
        self.written = 0
        self._on_bytes = on_bytes
        self._root = os.open(root, _ENOUGH_DIRECTORIES)
        self._base = uid_base
        self._directories: list[tuple[tuple[str, ...], int, float]] = []  # parts, mode, mtime
        os.chown(self._root, uid_base, uid_base)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                for parts, mode, mtime in reversed(self._directories):
                    with self._walk(parts, make=False, name="/".join(parts)) as fd:
                        os.chmod(fd, mode & 0o7777)
                        os.utime(fd, (mtime, mtime))
        finally:
            os.close(self._root)

    def add(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        parts = parts_of(member.name)
        self._on_bytes(_BLOCK)
        if member.isdir():
            with self._walk(parts, make=True, name=member.name) as fd:
                os.chown(fd, *self._owner(member))
            self._directories.append((parts, member.mode, member.mtime))
            return
        if not parts:
            raise BadRequest(f"entry {member.name!r} is the root and not a directory")
        if member.ischr() or member.isblk():
            return  # a sandbox has devices of its own
        with self._walk(parts[:-1], make=True, name=member.name) as parent:
            _clear(parts[-1], parent)
            if member.isreg():
                self._file(member, tar, parts[-1], parent)
            elif member.issym():
                os.symlink(member.linkname, parts[-1], dir_fd=parent)
                self._settle(member, parts[-1], parent)
            elif member.islnk():
                self._hard_link(member, parts[-1], parent)
            elif member.isfifo():
                os.mkfifo(parts[-1], 0o600, dir_fd=parent)
                os.chmod(parts[-1], member.mode & 0o777, dir_fd=parent)  # whatever the umask
                self._settle(member, parts[-1], parent)
            else:
                raise BadRequest(f"entry {member.name!r} is of the unknown type {member.type!r}")

    def _settle(self, member: tarfile.TarInfo, name: str, parent: int) -> None:
        """Owner and time of what is not opened."""
        os.chown(name, *self._owner(member), dir_fd=parent, follow_symlinks=False)
        os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)

    def _file(self, member: tarfile.TarInfo, tar: tarfile.TarFile, name: str, parent: int) -> None:
        source = tar.extractfile(member)
        if source is None:
            raise BadRequest(f"entry {member.name!r} has no content")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as target:
            self._copy(source, target)
            target.flush()  # a write that came later would take the capabilities away
            os.fchown(target.fileno(), *self._owner(member))
            os.fchmod(target.fileno(), member.mode & 0o7777)
            packed = member.pax_headers.get(f"SCHILY.xattr.{CAPABILITY}")
            if packed and (bound := bind_capability(packed.encode("utf-8", "surrogateescape"), self._base)):
                os.setxattr(target.fileno(), CAPABILITY, bound)
            os.utime(target.fileno(), (member.mtime, member.mtime))

    def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        while chunk := source.read(_CHUNK):
            self._on_bytes(len(chunk))
            target.write(chunk)
            self.written += len(chunk)

    def _hard_link(self, member: tarfile.TarInfo, name: str, parent: int) -> None:
        target = parts_of(member.linkname)
        if not target:
            raise BadRequest(f"entry {member.name!r} links to the root")
        with self._walk(target[:-1], make=False, name=member.name) as other:
            try:
                os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
            except OSError as error:
                raise BadRequest(f"entry {member.name!r} links to {member.linkname!r}: {error.strerror}") from error

    @contextmanager
    def _walk(self, parts: tuple[str, ...], *, make: bool, name: str) -> Iterator[int]:
        """Descend to a directory without following a symlink; `make` missing ones."""
        fd = os.dup(self._root)
        try:
            for part in parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                        os.chown(part, self._base, self._base, dir_fd=fd, follow_symlinks=False)
                try:
                    below = os.open(part, _ENOUGH_DIRECTORIES, dir_fd=fd)
                except OSError as error:
                    raise BadRequest(f"entry {name!r} passes through {part!r}, not a directory of it") from error
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _owner(self, member: tarfile.TarInfo) -> tuple[int, int]:
        return shifted(member.uid, self._base), shifted(member.gid, self._base)


def parts_of(name: str) -> tuple[str, ...]:
    """The path of an entry, part by part. Raises `BadRequest` where it leaves the archive, or is too deep or long."""
    if name.startswith("/"):
        raise BadRequest(f"entry {name!r} is absolute")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in name:
        raise BadRequest(f"entry {name!r} leaves the archive")
    if len(parts) > _DEEPEST or len(name) > _LONGEST:
        raise BadRequest(f"entry {name[:80]!r}... is {len(parts)} directories deep, or too long")
    return parts


def _clear(name: str, parent: int) -> None:
    """A later entry of the same name takes the place of an earlier one, except of a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError as error:
        raise BadRequest(f"entry {name!r} takes the place of a directory") from error
