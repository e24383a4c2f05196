"""The command line of one VMM, from what a machine is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TAP = "tap0"
Accel = Literal["kvm", "tcg"]
RINGBUF = 65536  # bytes of console that are kept
_TB_MB = 64  # translated code, under TCG
_TYPES: dict[str, str] = {
    # No PCI, no firmware tables: what starts quickest. Its timer calibration hangs without KVM.
    "kvm": "microvm,pit=off,pic=off,rtc=on",
    "tcg": "q35,hpet=on,sata=off,smbus=off,usb=off",
}


def machine_type(accel: Accel) -> str:
    """With its options."""
    return _TYPES[accel]


def cpu_model(accel: Accel) -> str:
    return "host" if accel == "kvm" else "max"


def device_of(serial: str) -> str:
    """What QEMU calls the guest's device of a disk."""
    return f"dev-{serial}"


@dataclass(frozen=True, slots=True)
class Drive:
    """A disk of the guest, which knows it by its serial. `path` is as the VMM sees it."""

    serial: str
    path: Path
    format: Literal["raw", "qcow2"]
    writable: bool = False

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """What QEMU is to open, as `blockdev-add` takes it, each after what it stands on; the last has the name of
        the serial."""
        below = f"file-{self.serial}"
        common: dict[str, Any] = {"read-only": not self.writable, "cache": {"direct": False, "no-flush": False}}
        if self.writable:
            common["discard"] = "unmap"
        file = {"driver": "file", "filename": str(self.path), "node-name": below, **common}
        zeroes = {"detect-zeroes": "unmap"} if self.writable else {}
        return file, {"driver": self.format, "node-name": self.serial, "file": below, **common, **zeroes}


@dataclass(frozen=True, slots=True)
class Absent:
    """The place of a disk that its machine is given later: nothing may be read from it until then."""

    serial: str
    writable: bool = False

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        options = {"read-zeroes": True, "read-only": not self.writable}
        return ({"driver": "null-co", "node-name": f"absent-{self.serial}", **options},)


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything a VMM is started with. Paths are as the VMM sees them; the sockets are open descriptors.

    `incoming` waits for a state to be loaded. `tap`: it has
    an interface, whose other end is `TAP`."""

    binary: str
    accel: Accel
    kernel: Path
    initrd: Path
    memory_mb: int
    vcpus: int
    agent_fd: int
    qmp_fd: int
    drives: Sequence[Drive | Absent] = ()
    incoming: bool = False
    tap: bool = False

    @property
    def type(self) -> str:
        return machine_type(self.accel).partition(",")[0]

    @property
    def cpu(self) -> str:
        return cpu_model(self.accel)

    def command(self) -> list[str]:
        return [
            *(self.binary, "-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", f"{machine_type(self.accel)},memory-backend=ram,suppress-vmdesc=on", "-cpu", self.cpu),
            *("-accel", "kvm" if self.accel == "kvm" else f"tcg,thread=multi,tb-size={_TB_MB}"),
            *("-m", f"{self.memory_mb}M", "-smp", str(self.vcpus), "-object", self._memory()),
            *("-global", "migration.send-configuration=off"),
            *("-kernel", str(self.kernel), "-initrd", str(self.initrd), "-append", self._append()),
            # A guest that ends stands still, so that whoever looks later still learns why.
            *("-action", "shutdown=pause,reboot=shutdown,panic=pause"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
            *("-chardev", f"socket,id=qmp,fd={self.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
            *("-chardev", f"ringbuf,id=console,size={RINGBUF}", "-serial", "chardev:console"),
            *("-chardev", f"socket,id=agent,fd={self.agent_fd},server=on,wait=off"),
            *("-device", f"virtio-serial-{self._bus}", "-device", "virtserialport,chardev=agent,name=sandyard.agent"),
            *(part for drive in self.drives for part in self._drive(drive)),
            *self._network(),
            *(("-incoming", "defer", "-S") if self.incoming else ()),
        ]

    @property
    def _bus(self) -> str:
        return "device" if self.type == "microvm" else "pci"

    def _memory(self) -> str:
        # Of one that waits for a state nothing is used: what is to be its memory is mapped over it.
        share = "off" if self.incoming else "on"
        return f"memory-backend-memfd,id=ram,size={self.memory_mb}M,share={share}"

    def _append(self) -> str:
        # There is no keyboard controller that could reset it: a panic ends in a triple fault, which QEMU sees.
        quick = "tsc=reliable no_timer_check reboot=t" if self.type == "microvm" else ""
        return f"console=ttyS0 quiet panic=-1 rdinit=/sandyard-agent random.trust_cpu=on {quick}".strip()

    def _drive(self, drive: Drive | Absent) -> Sequence[str]:
        nodes = drive.nodes()
        opened = (part for node in nodes for part in ("-blockdev", json.dumps(node)))
        top, device = nodes[-1]["node-name"], device_of(drive.serial)
        return (*opened, "-device", f"virtio-blk-{self._bus},drive={top},serial={drive.serial},id={device}")

    def _network(self) -> Sequence[str]:
        if not self.tap:
            return ()
        options = ",rombar=0" if self._bus == "pci" else ""
        backend = f"tap,id=net,ifname={TAP},script=no,downscript=no,vhost=off"
        return ("-netdev", backend, "-device", f"virtio-net-{self._bus},netdev=net{options}")
