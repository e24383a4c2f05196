"""Making a layer of what a sandbox has changed: a copy of its disk from one instant.

The disk is mounted in a mount namespace that nobody can enter by a path any more, so it is copied as an
image: its file system is made to write out all it holds, through the loop device it lives on. The copy can be
trusted as an ext4 image, because no sandbox ever writes to the device itself: only kernels do.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import structlog

from sandyard.errors import SandboxError
from sandyard.runtimes.container.derived import LayerGone, delta_of
from sandyard.runtimes.container.disk import tree_bytes
from sandyard.runtimes.container.increment import StandStill, TooMuch, commit_increment
from sandyard.runtimes.deltas import DeltaDamaged
from sandyard.runtimes.deltas.extents import copy, extents
from sandyard.runtimes.deltas.format import PARTIAL
from sandyard.runtimes.durable import sync
from sandyard.runtimes.room import check_room

log = structlog.get_logger("sandyard.commit")

_BLKFLSBUF = 0x1261
_COMPARED = 1 << 20


def loop_device(image: Path) -> Path | None:
    """The device that shows `image`; None where there is none. Blocking."""
    real = os.path.realpath(image)  # as the kernel has it
    for name in os.listdir("/sys/block"):
        if name.startswith("loop"):
            with suppress(OSError):  # not attached, or it went meanwhile
                if Path("/sys/block", name, "loop/backing_file").read_text().rstrip("\n") == real:
                    return Path("/dev", name)
    return None


def wait_detached(image: Path, deadline: float) -> None:
    """Wait until no device shows `image`: its file system is unmounted, and written to it. Blocking.

    Raises `SandboxError`."""
    while (device := loop_device(image)) is not None:
        if time.monotonic() > deadline:
            raise SandboxError(f"{device} does not let go of {image}")
        time.sleep(0.005)


def commit(home: Path, target: Path, stand_still: StandStill | None, durable: bool, parent: Path | None) -> int:
    """Copy the disk below `home` to `target`, and return the bytes that takes. Blocking.

    `stand_still` opens a context in which no process of the sandbox runs; None: it has none. `parent`: a layer
    that only the difference to is kept, where that is little. Raises `SandboxError`, with nothing left at `target`."""
    if os.path.lexists(target) or os.path.lexists(delta_of(target)):
        raise SandboxError(f"commit of sandbox {home.name}: {target} exists already")
    partial = target.with_name(target.name + PARTIAL)
    try:
        image = home / "disk.img"
        if image.exists():
            if parent is not None and not parent.is_dir():
                try:
                    return _increment(image, target, parent, stand_still, durable)
                except TooMuch:
                    pass
                except (DeltaDamaged, LayerGone) as error:  # this one needs nothing of it then
                    log.warning("a snapshot is kept whole", sandbox=home.name, error=error.message)
            size = _image(image, partial, stand_still)
            if durable:
                sync(partial)
        else:
            with stand_still() if stand_still is not None else nullcontext():
                _tree(home / "upper", partial)
            if durable:
                sync_tree(partial)
            size = tree_bytes(partial)
        os.rename(partial, target)
        if durable:
            sync(target.parent)
    except OSError as error:
        raise SandboxError(f"commit of sandbox {home.name} to {target}: {error.strerror or error}") from error
    finally:
        _remove(partial)
    return size


def sync_layers(layers: Sequence[Path]) -> None:
    """Bring layers that were committed to the host's disk; costs little for those that are. Blocking."""
    for layer in layers:
        if layer.is_file() and not delta_of(layer).exists():  # what can be made again needs no disk
            sync(layer)
            sync(layer.parent)


def sync_tree(path: Path) -> None:
    """Bring everything below a directory to the host's disk. Blocking."""
    done = subprocess.run(["sync", "--file-system", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SandboxError(f"sync of {path}: {done.stderr.strip()}")


def _increment(image: Path, target: Path, parent: Path, stand_still: StandStill | None, durable: bool) -> int:
    check_room(target.parent, 0)
    device = _device(image, stand_still)

    def written() -> int:
        if device is None:
            return 0
        _flush(device)
        return _written(device)

    return commit_increment(image, target, parent, stand_still, written, durable)


def _device(image: Path, stand_still: StandStill | None) -> Path | None:
    device = loop_device(image)
    if (device is None) != (stand_still is None):
        raise SandboxError(f"{image}: {'no' if device is None else 'still a'} device shows it")
    return device


def _image(image: Path, partial: Path, stand_still: StandStill | None) -> int:
    check_room(partial.parent, image.stat().st_blocks * 512)
    device = _device(image, stand_still)
    if device is None or stand_still is None:
        copy(image, partial)
    else:
        _flush(device)
        written = _written(device)
        copy(image, partial)  # while it still runs: often it writes nothing meanwhile, and this was all
        with stand_still():
            _flush(device)
            if _written(device) != written:
                _copy_again(image, partial)
    return partial.stat().st_blocks * 512


def _flush(device: Path) -> None:
    """Make the file system on a device write all of itself to it."""
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _BLKFLSBUF, 0)
    finally:
        os.close(descriptor)


def _written(device: Path) -> int:
    """How many sectors were ever written to the device."""
    return int(Path("/sys/block", device.name, "stat").read_text().split()[6])


def _copy_again(source: Path, target: Path) -> None:
    """Bring a copy up to date: what is the same is read and left, which is faster than writing it."""
    ours, theirs = bytearray(_COMPARED), bytearray(_COMPARED)
    target.chmod(0o600)
    with open(source, "rb", buffering=0) as reader, open(target, "r+b", buffering=0) as writer:
        for start, hole in extents(reader.fileno()):
            for at in range(start, hole, _COMPARED):
                size = min(_COMPARED, hole - at)
                wanted = memoryview(ours)[:size]
                os.preadv(reader.fileno(), [wanted], at)
                os.preadv(writer.fileno(), [memoryview(theirs)[:size]], at)
                if ours != theirs:  # behind `size` both are what the piece before left, which is the same then
                    os.pwrite(writer.fileno(), wanted, at)
                    theirs[:] = ours
    target.chmod(0o400)


def _tree(upper: Path, partial: Path) -> None:
    """Copy a directory with owners, modes, times, hard links, holes and all extended attributes; it follows
    no symlink, and nobody changes the tree meanwhile."""
    command = ["cp", "--no-dereference", "--recursive", "--sparse=auto", "--reflink=auto", "--no-target-directory"]
    command += ["--preserve=mode,ownership,timestamps,links,xattr", "--", str(upper), str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        raise SandboxError(f"copy of {upper} to {partial}: {lines[0]}")


def _remove(partial: Path) -> None:
    with suppress(FileNotFoundError):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()
