"""Suspended sandboxes: no VMM, but a disk and a memory image of one instant, by a record beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import decode_spec, encode_spec, read_json, write_json
from sandyard.runtimes.durable import sync
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.memory import image

_RECORD = "suspended.json"


@dataclass(frozen=True, slots=True)
class Suspended:
    """`image`: the name of its memory; `disk`: the number of the disk's image that belongs to it."""

    spec: SandboxSpec
    image: str
    disk: int


def save(layout: Layout, record: Suspended) -> None:
    """From here on the sandbox is suspended, and its VMM, if there is one, is nothing any more. Blocking."""
    home = layout.memory(record.spec.sandbox_id)
    Disks(layout, record.spec).sync()
    write_json(home / _RECORD, {**encode_spec(record.spec), "image": record.image, "disk": record.disk})
    for path in (home / _RECORD, home, home.parent):
        sync(path)


def load(layout: Layout, sandbox_id: str) -> Suspended | None:
    record = read_json(layout.memory(sandbox_id) / _RECORD)
    return None if record is None else Suspended(decode_spec(record), record["image"], record["disk"])


def forget(layout: Layout, sandbox_id: str) -> None:
    """It runs again. Idempotent."""
    (layout.memory(sandbox_id) / _RECORD).unlink(missing_ok=True)


def ids(layout: Layout) -> list[str]:
    if not layout.memories.is_dir():
        return []
    return sorted(name for name in os.listdir(layout.memories) if (layout.memories / name / _RECORD).exists())


def next_image(layout: Layout, sandbox_id: str) -> str:
    """A name that no image of the sandbox has, nor what a killed process left of one."""
    home = layout.memory(sandbox_id)
    home.mkdir(mode=0o700, exist_ok=True)
    return str(image.newest(home) + 1)


def tidy(layout: Layout, record: Suspended) -> None:
    """Remove what does not belong to it: images of memory that came before, disks of a start that failed."""
    sandbox_id = record.spec.sandbox_id
    image.keep_only(layout.memory(sandbox_id), record.image)
    Disks(layout, record.spec).drop_above(record.disk)
