"""The disk of a sandbox: what it may write above its template, with a hard limit where possible.

`loop`: a sparse ext4 image per sandbox, cloned from an empty one made once per size. It is mounted
by the launcher inside the sandbox's own mount namespace, so the kernel unmounts it. `none`: a plain
directory of the state path, with no limit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from sandyard.errors import CreateFailed
from sandyard.runtimes.room import check_room

DiskKind = Literal["loop", "none"]
_FORMAT = 1  # change when the empty image's making changes
_MAKING, _STALE_SECONDS = ".making-", 600
_FREEING_AT_ONCE = 64
# No journal: the disk dies with its sandbox. No resize inode, few superblock copies and packed
# metadata keep an empty image near 150 KiB.
_MKFS = [
    *("mkfs.ext4", "-q", "-F", "-m", "0", "-i", "8192"),
    *("-O", "^has_journal,^resize_inode,sparse_super2"),
    *("-E", "lazy_itable_init=1,nodiscard,packed_meta_blocks=1"),
]


@dataclass(slots=True)
class Disks:
    """Disks below `store`; `blanks` holds the empty images."""

    store: Path
    blanks: Path
    uid_base: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _freeing: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(_FREEING_AT_ONCE))

    def prepare(self, kind: DiskKind, sandbox_id: str, size_mb: int) -> list[str]:
        """Make what the launcher needs and return its arguments for the mounts below `MOUNT`.

        Blocking. The launcher's upper directory is `upper`, its work directory `work`, see `paths`.
        Raises `CreateFailed("disk")`.
        """
        home = self.store / sandbox_id
        try:
            self._check_room()
            home.mkdir(mode=0o700, parents=True)
            if kind == "none":
                _skeleton(home, self.uid_base)
                return []
            return ["--clone", str(self.blank(size_mb)), str(home / "disk.img")]
        except OSError as error:
            raise CreateFailed("disk", str(error)) from error

    def kind(self, sandbox_id: str) -> DiskKind:
        """Which kind of disk a sandbox has that was made before."""
        return "loop" if (self.store / sandbox_id / "disk.img").exists() else "none"

    def blank(self, size_mb: int) -> Path:
        """The empty image for `size_mb`, made on first use. Blocking; `CreateFailed("disk")`."""
        total = size_mb + size_mb // 24 + 4  # inodes and bitmaps are on top of what was promised
        name = hashlib.sha256(f"{_FORMAT} {_MKFS} {total} {self.uid_base}".encode()).hexdigest()[:16]
        path = self.blanks / f"{size_mb}-{name}.img"
        if path.exists():
            return path
        with self._lock:
            if not path.exists():
                self._make_blank(path, total)
        return path

    def used(self, sandbox_id: str) -> int:
        """Bytes of host disk the sandbox has allocated; 0 where it is gone."""
        home = self.store / sandbox_id
        try:
            return (home / "disk.img").stat().st_blocks * 512
        except FileNotFoundError:
            return tree_bytes(home / "upper")

    def ids(self) -> set[str]:
        return {entry.name for entry in os.scandir(self.store)} if self.store.is_dir() else set()

    def remove(self, sandbox_id: str) -> None:
        """Remove the files; no process of the sandbox is left. Idempotent.

        The image's name is gone on return, its blocks a moment later: a host file system mounted
        with `discard` waits for the device at each extent it frees."""
        home = self.store / sandbox_id
        if not home.exists():
            return
        held = _hold(home / "disk.img")
        try:
            shutil.rmtree(home)
        finally:
            if held is not None:
                self._free(held)

    def _free(self, descriptor: int) -> None:
        """Close what keeps a removed image's blocks, off the caller's path unless many are waiting."""
        if not self._freeing.acquire(blocking=False):
            os.close(descriptor)
            return

        def close() -> None:
            os.close(descriptor)
            self._freeing.release()

        threading.Thread(target=close, name="sandyard-free", daemon=True).start()

    def _check_room(self) -> None:
        self.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(self.store, 0, error=partial(CreateFailed, "disk"))

    def _make_blank(self, path: Path, total_mb: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stale in path.parent.glob(f"{_MAKING}*"):
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(stale, ignore_errors=True)  # of a killed process; or another removes it right now
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_MAKING) as scratch:
            skeleton, image = Path(scratch, "skeleton"), Path(scratch, "image")
            skeleton.mkdir()
            _skeleton(skeleton, self.uid_base)
            command = [*_MKFS, "-d", str(skeleton), str(image), f"{total_mb}m"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except FileNotFoundError as error:
                raise CreateFailed("disk", "mkfs.ext4 not found", remedy="apt-get install e2fsprogs") from error
            if done.returncode != 0:
                raise CreateFailed("disk", f"mkfs.ext4: {done.stderr.strip()}")
            image.rename(path)


def _hold(image: Path) -> int | None:
    try:
        return os.open(image, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # no image: a plain directory, or one that was never cloned


def _skeleton(home: Path, uid: int) -> None:
    """`upper` with what every sandbox must have whatever its template lacks, and an empty `work`."""
    for name, mode in (("upper", 0o755), ("upper/etc", 0o755), ("upper/tmp", 0o1777)):
        where = home / name
        where.mkdir()
        where.chmod(mode)
        os.chown(where, uid, uid)
    (home / "work").mkdir()


def tree_bytes(root: Path) -> int:
    """Allocated bytes below `root`, read through directory descriptors: no symlink is followed."""
    total = 0
    if root.is_dir():
        for _, directories, files, fd in os.fwalk(root):
            for name in (*directories, *files):
                try:
                    total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    continue  # the sandbox is at work
    return total
