"""The disk of a sandbox: a qcow2 image above a blank one of its size, and chains of them."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from sandyard.errors import SandboxError
from sandyard.runtimes.durable import sync

_MIB = 1 << 20
BLANK = "blank.img"
DEEPEST = 8  # images of one sandbox: then they are made one
_JOURNAL_MB = 8
_TIMEOUT = 600.0
_PAGE, _CLUSTER = 4096, 65536
# In the header of a qcow2 image: the place of the name of the image below, and the bytes of that name.
_NAME_PLACE, _NAME_AT, _NAME_SIZE = 8, struct.Struct(">Q"), struct.Struct(">I")
_IMAGE = re.compile(r"disk[0-9]{1,9}\.qcow2")


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


def first(home: Path, empty: Path) -> Path:
    """The image that a new sandbox writes to, in its directory `home`. Blocking. Raises `SandboxError`."""
    try:
        os.link(empty, home / BLANK)
    except OSError as error:
        raise SandboxError(f"disk in {home}: {error.strerror}") from error
    return above(home, BLANK, "raw", empty.stat().st_size, 0)


def above(home: Path, backing: str, kind: str, size: int, number: int) -> Path:
    """Image `number` of a sandbox, above `backing`, a name in the same directory: so the chain is the same
    wherever the directory is seen. Blocking."""
    path, scratch = home / image(number), home.with_name(f".{home.name}-{secrets.token_hex(4)}")
    owner = home.stat()
    try:
        # Beside the directory, in which a VMM may have put a link of any name.
        with open(scratch, "xb") as file:
            os.fchmod(file.fileno(), 0o600)
            _write_empty(file, _empty(home.parent, kind, size), backing)
        os.chown(scratch, owner.st_uid, owner.st_gid)
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
    header = bytearray(empty[:_CLUSTER])
    _NAME_SIZE.pack_into(header, _NAME_PLACE + _NAME_AT.size, len(name))
    header[at : at + len(name)] = name
    file.truncate(len(empty))
    file.write(header[: at + len(name)])
    for offset in range(_CLUSTER, len(empty), _PAGE):
        page = empty[offset : offset + _PAGE]
        if page.strip(b"\0"):
            file.seek(offset)
            file.write(page)


def image(number: int) -> str:
    return f"disk{number}.qcow2"


def top(home: Path) -> int:
    """The number of the image that is written to."""
    return max(int(path.stem.removeprefix("disk")) for path in _images(home))


def depth(home: Path) -> int:
    return len(_images(home))


def keep_only(home: Path, number: int) -> None:
    """Remove the images below, which nothing needs any more."""
    for path in _images(home):
        if path.name != image(number):
            path.unlink()


def give(home: Path, uid: int) -> None:
    """Let the images of a sandbox be the user's `uid`, that its next VMM has; root's, which others share, stay
    root's. Raises `OSError`."""
    for path in _images(home):
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)  # what is looked at is what is given, and no other
        try:
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode) and found.st_uid not in (0, uid):
                os.chown(f"/proc/self/fd/{descriptor}", uid, uid)
        finally:
            os.close(descriptor)


def link(home: Path, target: Path) -> None:
    """Give the images of a sandbox, which has no VMM, names in the directory `target` too. Raises `OSError`."""
    for path in (*_images(home), home / BLANK):
        if stat.S_ISREG(path.lstat().st_mode):  # a VMM may have put anything there
            os.link(path, target / path.name)


def take(scratch: Path, target: Path, durable: bool) -> int:
    """Make what a confined tool wrote an immutable layer at `target`, a new name; its bytes on the host's disk.

    Blocking. Raises `SandboxError`, with nothing at `target`."""
    try:
        descriptor = os.open(scratch, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SandboxError(f"commit to {target}: {scratch.name} is not a file")
            os.fchown(descriptor, 0, 0)
            os.fchmod(descriptor, 0o444)
            if durable:
                os.fsync(descriptor)
            # This very file, whatever its name is now; only with a directory does Python follow the link.
            os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor)
            if durable:
                sync(target.parent)
            return os.fstat(file.fileno()).st_blocks * 512
    except OSError as error:
        raise SandboxError(f"commit to {target}: {error.strerror}") from error


def used_bytes(home: Path) -> int:
    """What the chain of a sandbox takes on the host's disk."""
    return sum(path.lstat().st_blocks * 512 for path in _images(home))


def _images(home: Path) -> list[Path]:
    return [path for path in home.glob("disk*.qcow2") if _IMAGE.fullmatch(path.name)]


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
