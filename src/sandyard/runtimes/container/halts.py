"""Halted sandboxes: their records, which lie beside their disks and outlive a boot of the host."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.commit import sync_layers, sync_tree, wait_detached
from sandyard.runtimes.container.layout import boot_id, decode_spec, encode_spec, read_json, write_json
from sandyard.runtimes.deltas.format import sync

_RECORD = "halted.json"


@dataclass(frozen=True, slots=True)
class Halt:
    """`complete`: its processes are gone and its disk is whole; else that is still to be done."""

    spec: SandboxSpec
    complete: bool


@dataclass(frozen=True, slots=True)
class Halts:
    """Below `disks`, one directory per sandbox. Every method blocks."""

    disks: Path

    def begin(self, spec: SandboxSpec) -> None:
        """From here on, and until it is forgotten, the sandbox counts as halted: a crash is repaired by halting
        it again."""
        self._write(spec, complete=False)

    def complete(self, spec: SandboxSpec, deadline: float) -> None:
        """No process is left: wait for the disk to be whole, and make it outlive the host.

        Raises `SandboxError`."""
        image = self.disks / spec.sandbox_id / "disk.img"
        if image.exists():
            wait_detached(image, deadline)
            sync(image)
        else:
            sync_tree(image.parent)
        sync_layers(spec.rootfs.layers)
        self._write(spec, complete=True)

    def get(self, sandbox_id: str) -> Halt | None:
        """None where it is not halted, or was not halted whole before the host went down."""
        record = read_json(self.disks / sandbox_id / _RECORD)
        if record is None or not (record["complete"] or record["boot_id"] == boot_id()):
            return None
        return Halt(decode_spec(record), bool(record["complete"]))

    def ids(self) -> list[str]:
        if not self.disks.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.disks) if self.get(entry.name) is not None)

    def forget(self, sandbox_id: str) -> None:
        """It runs again, or is to be removed. Idempotent."""
        (self.disks / sandbox_id / _RECORD).unlink(missing_ok=True)

    def _write(self, spec: SandboxSpec, *, complete: bool) -> None:
        home = self.disks / spec.sandbox_id
        write_json(home / _RECORD, {**encode_spec(spec), "complete": complete, "at": time.time()})
        if complete:
            sync(home / _RECORD)
            sync(home)
