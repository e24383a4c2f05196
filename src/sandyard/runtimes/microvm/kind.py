"""Which VMMs are alike: all that one is started with, but for the sandbox it is for, and the kernel if it boots one."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.runtimes.microvm.assets import Assets
from sandyard.runtimes.microvm.cgroup import VmLimits
from sandyard.runtimes.microvm.choice import Engine
from sandyard.runtimes.microvm.disks import most_bytes
from sandyard.runtimes.microvm.launch import SHARED
from sandyard.runtimes.microvm.machine import Absent, Accel, Drive, Machine
from sandyard.runtimes.microvm.memory.checking import STATE_MAX

_KERNEL, _INITRD = "kernel", "initrd"


@dataclass(frozen=True, slots=True)
class Kind:
    """`memory_mb`: the RAM of the guest; `layers`: how many committed ones it has as disks, above `disk_mb` of its
    own."""

    engine: Engine
    accel: Accel
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
        return "kvm" if self.accel == "kvm" else ""

    def machine(self, drives: Sequence[Drive | Absent], agent_fd: int, qmp_fd: int, *, incoming: bool) -> Machine:
        return Machine(
            binary=self.engine.path,
            accel=self.accel,
            kernel=SHARED / _KERNEL,
            initrd=SHARED / _INITRD,
            memory_mb=self.memory_mb,
            vcpus=vcpus(self.cpu),
            agent_fd=agent_fd,
            qmp_fd=qmp_fd,
            drives=drives,
            tap=self.tap,
            incoming=incoming,
        )


def booted(assets: Assets) -> dict[str, Path]:
    """What a VMM reads whose guest boots, by its names below `SHARED`."""
    return {_KERNEL: assets.kernel, _INITRD: assets.initrd}


def vcpus(cpu: float) -> int:
    """Not more than the host has: a guest with dozens that take turns on a few hardly boots."""
    return max(1, min(math.ceil(cpu), os.cpu_count() or 1))
