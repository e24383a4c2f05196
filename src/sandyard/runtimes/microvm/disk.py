"""The files that disks of sandboxes are made of: blank ones, images above others, copies that nobody can change."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import struct
import subprocess
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas.extents import extents
from sandyard.runtimes.durable import sync
from sandyard.runtimes.microvm.layout import user_of
from sandyard.runtimes.microvm.qcow2 import opened

_MIB = 1 << 20
_JOURNAL_MB = 8
_TIMEOUT = 600.0
_CHUNK = 64 << 10  # a cluster
DIGEST = 32  # characters of one
_PAGE = 4096
# In the header of a qcow2 image: the place of the name of the image below, and the bytes of that name.
_NAME_PLACE, _NAME_AT, _NAME_SIZE = 8, struct.Struct(">Q"), struct.Struct(">I")


def blank(store: Path, size_mb: int) -> Path:
    """An empty file system in which `size_mb` MiB can be written: sparse, made once. Blocking.

    Raises `SandboxError`."""
    path = store / f"blank-{size_mb}.img"
    if path.exists():
        return path
    with open(store / ".blank.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        scratch = store / f".blank-{size_mb}.making"
        try:
            with open(scratch, "wb") as file:
                file.truncate((size_mb + size_mb // 20 + _JOURNAL_MB + 4) * _MIB)
            options = ["-O", "^resize_inode,sparse_super2", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard"]
            run(["mkfs.ext4", "-q", "-F", "-m", "0", "-J", f"size={_JOURNAL_MB}", *options, str(scratch)])
            scratch.chmod(0o444)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    return path


def above(home: Path, backing: str, kind: str, size: int, number: int) -> Path:
    """Image `number` of a sandbox, above what has the name `backing`: nobody goes by that name, but that there is one
    says that the image does not stand for itself. Blocking."""
    path, scratch = home / image(number), home.with_name(f".{home.name}-{secrets.token_hex(4)}")
    try:
        uid = user_of(home)
        # Beside the directory, in which a VMM may have put a link of any name.
        with open(scratch, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            _write_empty(file, _empty(home.parent, kind, size), backing)
        os.chown(scratch, uid, uid)
        scratch.replace(path)
    except OSError as error:
        raise SandboxError(f"disk in {home}: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return path


@lru_cache(maxsize=32)
def _empty(store: Path, kind: str, size: int) -> bytes:
    """An image of `size` bytes with nothing in it, above one of the format `kind`. Raises `SandboxError`."""
    scratch = store / f".empty-{secrets.token_hex(4)}"
    try:
        run(["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", "x", "-F", kind, str(scratch), str(size)])
        return scratch.read_bytes()
    finally:
        scratch.unlink(missing_ok=True)


def _write_empty(file: BinaryIO, empty: bytes, backing: str) -> None:
    """Its header says where the name of the image below is, which nothing follows in its cluster, and how long."""
    name = backing.encode()
    (at,) = _NAME_AT.unpack_from(empty, _NAME_PLACE)
    header = bytearray(empty[:_CHUNK])
    _NAME_SIZE.pack_into(header, _NAME_PLACE + _NAME_AT.size, len(name))
    header[at : at + len(name)] = name
    file.truncate(len(empty))
    file.write(header[: at + len(name)])
    for offset in range(_CHUNK, len(empty), _PAGE):
        page = empty[offset : offset + _PAGE]
        if page.strip(b"\0"):
            file.seek(offset)
            file.write(page)


def image(number: int) -> str:
    return f"disk{number}.qcow2"


def to_be_written(home: Path, name: str) -> Path:
    """A new empty file in the directory of a VMM or a tool, which can make none itself. Raises `OSError`."""
    path, uid = home / name, user_of(home)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchown(descriptor, uid, uid)
    finally:
        os.close(descriptor)
    return path


def take(scratch: Path, target: Path, durable: bool) -> int:
    """Make what a confined tool wrote, or a VMM that has ended, an immutable file at `target`, a new name; its bytes
    on the host's disk.

    Blocking. Raises `SandboxError`, with nothing at `target`."""
    try:
        with opened(scratch) as descriptor:
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, 0o444)
            if durable:
                os.fsync(descriptor)
            # This very file, whatever its name is now; only with a directory does Python follow the link.
            os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor)
            if durable:
                sync(target.parent)
            return os.fstat(descriptor).st_blocks * 512
    except OSError as error:
        raise SandboxError(f"commit to {target}: {error.strerror}") from error


def copy(source: Path, target: Path, most: int) -> str:
    """Write what a VMM has written, and may still write to, to the new file `target`, which nobody can change; its
    digest. Only what is not zero is written; more than `most` bytes of that are no disk.

    Blocking. Raises `SandboxError`, `OSError`; what is at `target` then is half."""
    with opened(source) as descriptor, open(target, "xb", buffering=0) as file:
        state, size, written = _state(), os.fstat(descriptor).st_size, 0
        if size > 4 * most:
            raise SandboxError(f"{source.name} has {size} bytes: it is no image of a disk")
        os.ftruncate(file.fileno(), size)
        for at, data in _chunks(descriptor, size):
            written += len(data)
            if written > most:
                raise SandboxError(f"{source.name} has more than {most} bytes: it is no image of a disk")
            state.update(b"%d:" % at + data)
            os.pwrite(file.fileno(), data, at)
        os.fchmod(file.fileno(), 0o444)
        state.update(b"%d" % size)
        return state.hexdigest()


def digest(path: Path) -> str:
    """The same for files of the same content, whatever of it is a hole. Blocking. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        state, size = _state(), os.fstat(file.fileno()).st_size
        for at, data in _chunks(file.fileno(), size):
            state.update(b"%d:" % at + data)
        state.update(b"%d" % size)
        return state.hexdigest()


def _state() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST // 2)


def _chunks(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """What is not zero, as pieces that do not depend on where the file has holes."""
    zero, done = bytes(_CHUNK), 0
    for begin, end in extents(descriptor):
        for at in range(max(done, begin // _CHUNK * _CHUNK), min(end, size), _CHUNK):
            data = os.pread(descriptor, min(_CHUNK, size - at), at)
            done = at + _CHUNK
            if data and data != zero[: len(data)]:
                yield at, data


def run(command: Sequence[str]) -> str:
    """Run a tool to its end. Raises `SandboxError` with what it said last."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"{command[0]}: {error}") from error
    if ended.returncode != 0:
        said = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1:]
        raise SandboxError(f"{command[0]} ended with {ended.returncode}: {''.join(said)}")
    return ended.stdout
