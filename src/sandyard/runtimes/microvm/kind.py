"""Which VMMs are alike: all that one is started with, but for the sandbox it is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.runtimes.microvm.cgroup import VmLimits
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import most_bytes
from sandyard.runtimes.microvm.launch import SHARED
from sandyard.runtimes.microvm.machine import Absent, Drive, Machine
from sandyard.runtimes.microvm.memory.checking import STATE_MAX


@dataclass(frozen=True, slots=True)
class Kind:
    """`memory_mb`: the RAM of the guest; `layers`: how many committed ones it has as disks, above `disk_mb` of its
    own."""

    choice: Choice
    memory_mb: int
    disk_mb: int
    overhead_mb: int
    cpu: float
    tap: bool
    layers: int

    @property
    def limits(self) -> VmLimits:
        return VmLimits((self.memory_mb + self.overhead_mb) << 20, self.cpu)

    @property
    def file_bytes(self) -> int:
        """Of the biggest file that its VMM writes: RAM, an image of its disk, a state of its devices."""
        return max(self.memory_mb << 20, most_bytes(self.disk_mb), STATE_MAX)

    @property
    def device(self) -> str:
        """Of the host, that its VMM needs."""
        return "kvm" if self.choice.accel == "kvm" else ""

    @property
    def shared(self) -> dict[str, Path]:
        """What all VMMs of this kind read."""
        return {"kernel": self.choice.assets.kernel, "initrd": self.choice.assets.initrd}

    def machine(self, drives: Sequence[Drive | Absent], agent_fd: int, qmp_fd: int, *, incoming: bool) -> Machine:
        return Machine(
            binary=self.choice.engine.path,
            accel=self.choice.accel,
            kernel=SHARED / "kernel",
            initrd=SHARED / "initrd",
            memory_mb=self.memory_mb,
            vcpus=vcpus(self.cpu),
            agent_fd=agent_fd,
            qmp_fd=qmp_fd,
            drives=drives,
            tap=self.tap,
            incoming=incoming,
        )


def vcpus(cpu: float) -> int:
    return max(1, math.ceil(cpu))
