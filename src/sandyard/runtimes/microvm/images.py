"""A template's layers as one read-only block image, made once and shared by every guest.

The layers are mounted over each other in a mount namespace of the maker's own, so that what an upper
one took away is gone, and copied by a process in the user namespace of container sandboxes, so that
owners and file capabilities are those the guest shall see.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sandyard.errors import CreateFailed

FORMAT = 2  # change when the making of images changes
ID_COUNT = 65536
_MIB = 1 << 20
_TIMEOUT = 1800.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# mount(8) of util-linux 2.39 and later hands options over one by one, of 255 characters at most: too few for layers.
_ENV = {"PATH": _PATH, "LIBMOUNT_FORCE_MOUNT2": "always"}
# Run by a fresh interpreter: waits in a new user namespace until its maps are written, then becomes the command.
_ENTER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000):
    raise OSError(ctypes.get_errno(), "unshare")
print(flush=True)
sys.stdin.readline()
os.setresgid(0, 0, 0)
os.setresuid(0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def image_of(layers: Sequence[Path], images: Path, uid_base: int) -> Path:
    """The image with the content of directories `layers`, the topmost first; made if it is not there.

    Blocking; one maker at a time per image, also between processes. Raises `CreateFailed("rootfs")`."""
    name = _name(layers, uid_base)
    path = images / f"{name}.img"
    if path.exists():
        os.utime(path)
        return path
    with open(images / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            scratch = images / f".{name}.making"
            try:
                sweep(images)
                _make(layers, scratch, uid_base)
                path.with_suffix(".json").write_text(json.dumps([str(layer) for layer in layers]))
                scratch.replace(path)
            except (OSError, subprocess.SubprocessError) as error:
                raise CreateFailed("rootfs", f"block image of {layers[0]}: {error}") from error
            finally:
                scratch.unlink(missing_ok=True)
    return path


def sweep(images: Path) -> None:
    """Remove the images of layers that are gone: nothing can start from them any more. A guest that runs keeps
    what it has. Blocking."""
    for path in images.glob("*.img"):
        record = path.with_suffix(".json")
        if path.name.startswith((".", "blank-")) or (record.exists() and _all_there(record)):
            continue
        for garbage in (path, record, images / f".{path.stem}.lock"):
            garbage.unlink(missing_ok=True)


def _all_there(record: Path) -> bool:
    try:
        return all(Path(layer).exists() for layer in json.loads(record.read_text()))
    except (OSError, ValueError):  # another one swept it, or a crash left half of it
        return False


def _name(layers: Sequence[Path], uid_base: int) -> str:
    """By what a layer is, not where: its inode and time of making, which a rebuilt one does not share."""
    state = hashlib.sha256(f"{FORMAT} {uid_base}".encode())
    for layer in layers:
        stat = layer.stat()
        state.update(f" {stat.st_dev} {stat.st_ino} {stat.st_ctime_ns} {layer}".encode())
    return state.hexdigest()[:24]


def _make(layers: Sequence[Path], target: Path, uid_base: int) -> None:
    size, entries = _measure(layers)
    with open(target, "w+b") as file:
        os.fchown(file.fileno(), uid_base, uid_base)
        file.truncate((size * 5 // 4 + entries * 512 + 32 * _MIB) // _MIB * _MIB)
        # By the descriptor: the directories above it are closed to that user.
        made = ("-N", str(entries + 256), "-d", ".", f"/proc/self/fd/{file.fileno()}")
        options = ("-O", "^has_journal,^resize_inode,sparse_super2", "-E", "lazy_itable_init=1,nodiscard")
        program = shutil.which("mkfs.ext4", path=_PATH)
        if program is None:
            raise OSError("no mkfs.ext4 on this host: install e2fsprogs")
        command = [program, "-q", "-F", "-m", "0", "-b", "4096", *options, *made]
        _in_namespaces(layers, command, file.fileno(), uid_base)
        os.fchown(file.fileno(), 0, 0)
        os.fchmod(file.fileno(), 0o444)
        os.fsync(file.fileno())


def _measure(layers: Sequence[Path]) -> tuple[int, int]:
    """Bytes on disk and entries, of all layers together."""
    size = entries = 0
    for layer in layers:
        for _, directories, files, fd in os.fwalk(layer):
            for name in (*directories, *files):
                size += -(-os.stat(name, dir_fd=fd, follow_symlinks=False).st_size // 4096) * 4096
                entries += 1
    return size, entries


def _in_namespaces(layers: Sequence[Path], command: Sequence[str], descriptor: int, uid_base: int) -> None:
    inner = [sys.executable, "-I", "-S", "-c", _ENTER, *command]
    bind = len(layers) == 1
    source = str(layers[0]) if bind else f"lowerdir={':'.join(str(layer) for layer in layers)}"
    mount = 'mount --bind "$1" /mnt' if bind else 'mount -t overlay -o "ro,$1" overlay /mnt'
    script = f'{mount} && shift && cd /mnt && exec "$@"'
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", source, *inner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(descriptor,),
        env=_ENV,
    ) as process:
        try:
            assert process.stdout is not None  # asked for above
            if process.stdout.readline():  # every step is an exec, so that the pid is that of the namespace's first
                for name in ("uid_map", "gid_map"):
                    Path(f"/proc/{process.pid}/{name}").write_text(f"0 {uid_base} {ID_COUNT}")
            _, said = process.communicate(b"\n", timeout=_TIMEOUT)
        except BaseException:
            process.kill()
            raise
        if process.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"mkfs.ext4 ended with {process.returncode}: {''.join(lines)}")
