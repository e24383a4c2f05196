"""What a process that serves one lazy file is told, and what it tells."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PART = ".lazy"
READY, HELD = "ready", "held"
BUSY = "busy"  # with what an earlier process left, before it is ready: any number of times
_TRIES, _PAUSE = 20, 0.02


@dataclass(frozen=True, slots=True)
class Order:
    """`layer` becomes a link to `mount` until it is whole, then the file itself. `chunks` as in `filling`."""

    layer: Path
    mount: Path
    size: int
    chunks: Sequence[tuple[int, int, str]]
    blobs: Mapping[str, Any]

    def text(self) -> str:
        return json.dumps({**asdict(self), "layer": str(self.layer), "mount": str(self.mount)})

    @classmethod
    def parse(cls, text: str) -> Order:
        """Raises `ValueError`, `KeyError`, `TypeError`."""
        found = json.loads(text)
        chunks = [(int(offset), int(length), str(digest)) for offset, length, digest in found["chunks"]]
        return cls(Path(found["layer"]), Path(found["mount"]), int(found["size"]), chunks, dict(found["blobs"]))

    @property
    def part(self) -> Path:
        """What there is of it."""
        return self.layer.with_name(self.layer.name + PART)

    @property
    def linked(self) -> bool:
        """Whether the layer is the link, and not whole or removed."""
        with suppress(OSError):
            return os.readlink(self.layer) == str(self.mount)
        return False


class Word:
    """The lock of the process that serves `mount`, with its id and what went wrong."""

    def __init__(self, mount: Path) -> None:
        self.path = mount.with_name(mount.name + ".lock")
        self._descriptor = -1

    def take(self) -> bool:
        """Whether no other process has it."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        for _ in range(_TRIES):  # whoever looks has it for a moment
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.tell(None)
                return True
            time.sleep(_PAUSE)
        os.close(self._descriptor)
        return False

    def tell(self, error: str | None) -> None:
        """Of the process that took it: what it is, and what the file cannot be read for."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "error": error}).encode(), 0)

    def drop(self) -> None:
        """Nobody serves any more."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def heard(self) -> tuple[int | None, str | None]:
        """The id of the process that lives, and what it told last."""
        try:
            with open(self.path) as file:
                told = json.loads(file.read() or "{}")
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(told["pid"]), told["error"]
                return None, told.get("error")
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None, None
