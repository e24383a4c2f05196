"""A layer that is kept as what changed since an earlier one of the same disk.

`<layer>.delta` holds the blocks that differ from its parent's, a layer beside it; `<layer>` itself, the image that
both make, is written when a sandbox first starts from it and may be removed whenever none does. That image is not
brought to the host's disk: one of an earlier boot of the host is not trusted, but made again.

Who makes, removes or merges holds a lock on the delta. Who only reads a chain does not: what is open stays readable,
and where a link went between two looks the chain is looked at again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas import Chain, materialise
from sandyard.runtimes.deltas.format import PARTIAL, parent_name
from sandyard.runtimes.durable import sync
from sandyard.runtimes.room import RESERVE

MAX_DEPTH = 8
"""How many deltas may lie on each other: each is read to make the image."""
SUFFIX = ".delta"
MERGED = ".merged"
_MADE = ".made"
_KEPT_SECONDS = 600.0
_MARK = "user.sandyard.boot"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOOKS = 5


class LayerGone(SandboxError):
    """A layer that others are kept as the difference to is not there."""


def delta_of(layer: Path) -> Path:
    """Where a layer's delta is, if it has one."""
    return layer.with_name(layer.name + SUFFIX)


def parent_of(layer: Path) -> Path | None:
    """The layer that this one needs; None for a whole image. Raises `SandboxError` for a damaged delta."""
    try:
        return layer.with_name(parent_name(delta_of(layer)))
    except FileNotFoundError:
        return None


def exists(layer: Path) -> bool:
    """Whether a sandbox can start from it."""
    return layer.is_dir() or layer.is_file() or delta_of(layer).is_file()


def ancestry(layer: Path) -> tuple[Path, list[Path]]:
    """The whole image at the root of a layer, and the layers kept as deltas above it, the lowest first.

    Raises `LayerGone`, `DeltaDamaged`."""
    above: list[Path] = []
    while (parent := parent_of(layer)) is not None:
        above.insert(0, layer)
        layer = parent
        if len(above) > MAX_DEPTH:
            raise SandboxError(f"more than {MAX_DEPTH} deltas above {layer}")
    if not layer.is_file():
        raise LayerGone(f"layer {layer} is gone, and others are kept as what differs from it")
    return layer, above


def open_chain(root: Path, above: Sequence[Path], drafts: Sequence[Path] = ()) -> Chain:
    """What `ancestry` found, with unnamed deltas above. Raises `LayerGone` where it changed since."""
    try:
        return Chain(root, [*map(delta_of, above), *drafts])
    except FileNotFoundError as error:
        raise LayerGone(f"{error.filename} is gone, and other layers are kept as what differs from it") from error


def ready(layers: Sequence[Path]) -> None:
    """See to it that each of these layers is there as a whole. Blocking; several may do it at once, also other
    processes. Raises `SandboxError` naming what is damaged or gone, `OSError`."""
    for layer in layers:
        with locked(layer) as is_delta:
            if is_delta:
                if not (layer.is_file() and _trusted(layer)):
                    make(layer)
                os.utime(layer)  # it is wanted


def make(layer: Path, *, durable: bool = False) -> None:
    """Write the image of a layer, which is locked. Raises `SandboxError`, `OSError`."""
    made = layer.with_name(layer.name + _MADE)
    _sweep(layer)  # of a process that was killed
    try:
        for look in range(_LOOKS):
            try:
                root, above = ancestry(layer)
                materialise(root, [delta_of(each) for each in above], made, reserve=RESERVE)
                break
            except (FileNotFoundError, LayerGone) as error:
                if look == _LOOKS - 1:
                    raise LayerGone(f"layer {layer} cannot be put together: {error}") from error
        if durable:
            sync(made)
        else:
            with suppress(OSError):  # a file system without attributes: it is not trusted, and made again
                os.setxattr(made, _MARK, _boot())
        os.rename(made, layer)
        if durable:
            sync(layer.parent)
    finally:
        made.unlink(missing_ok=True)


def forget(layer: Path) -> bool:
    """Remove the image of a layer that has a delta to make it from, if nobody wanted it lately, and what killed
    processes left of it. Blocking."""
    with locked(layer, wait=False) as is_delta:
        if not is_delta:
            return False
        _sweep(layer)
        with suppress(FileNotFoundError):
            if time.time() - layer.stat().st_mtime > _KEPT_SECONDS:
                layer.unlink()
                return True
    return False


@contextmanager
def locked(layer: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a layer's delta, against others that make, remove or merge it; False: it has none, or another holds it
    and is not waited for."""
    while True:
        try:
            lock = open(delta_of(layer), "rb")  # noqa: SIM115 - closed below, and kept while its name moved on
        except FileNotFoundError:
            yield False
            return
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            if _is(lock.fileno(), delta_of(layer)):  # else it was merged while we waited
                yield True
                return


def _is(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _sweep(layer: Path) -> None:
    for suffix in (_MADE, _MADE + PARTIAL, SUFFIX + MERGED, SUFFIX + MERGED + PARTIAL):
        layer.with_name(layer.name + suffix).unlink(missing_ok=True)


def _trusted(layer: Path) -> bool:
    with suppress(OSError):  # no mark
        return os.getxattr(layer, _MARK) == _boot()
    return False


def _boot() -> bytes:
    return _BOOT_ID.read_bytes().strip()
