"""The command line of one VMM, from what a machine is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sandyard.runtimes.microvm.qcow2 import Format, Image

TAP = "tap0"
Accel = Literal["kvm", "tcg"]
RINGBUF = 65536  # bytes of console that are kept
DEVICES = 2
"""To be raised when a guest gets other devices: it cannot go on with them from a state of those before."""
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
    """A disk of the guest, which knows it by its serial. `path` is as the VMM sees it; `below`: what it lies above,
    the lowest first."""

    serial: str
    path: Path
    format: Format
    writable: bool = False
    below: Sequence[Image] = ()

    def nodes(self) -> Sequence[dict[str, Any]]:
        """As QEMU is told of them; the last has the name of the serial. What lies below is always said: a VMM may have
        written anything into a header."""
        found: list[dict[str, Any]] = []
        name: str | None = None
        for number, image in enumerate([*self.below, Image(self.path, self.format)]):
            top = number == len(self.below)
            below, name = name, self.serial if top else f"{self.serial}-{number}"
            common = {"read-only": not (top and self.writable), "cache": {"direct": False, "no-flush": False}}
            if top and self.writable:
                common["discard"] = "unmap"
            file = {"driver": "file", "filename": str(image.path), "node-name": f"file-{name}", **common}
            node = {"driver": image.format, "node-name": name, "file": f"file-{name}", **common}
            if top and self.writable:
                node["detect-zeroes"] = "unmap"
            found += [file, node | ({"backing": below} if image.format == "qcow2" else {})]
        return found


@dataclass(frozen=True, slots=True)
class Absent:
    """The place of a disk that its machine is given later: nothing may be read from it until then."""

    serial: str
    writable: bool = False

    def nodes(self) -> Sequence[dict[str, Any]]:
        options = {"read-zeroes": True, "read-only": not self.writable}
        return [{"driver": "null-co", "node-name": f"absent-{self.serial}", **options}]


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything a VMM is started with. Paths are as the VMM sees them; the sockets are open descriptors.

    `incoming` waits for a state to be loaded, and has no use for kernel and RAM disk. `tap`: it has an interface, whose
    other end is `TAP`."""

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
            # A guest that ends stands still, so that whoever looks later still learns why.
            *("-action", "shutdown=pause,reboot=shutdown,panic=pause"),
            *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
            *("-chardev", f"socket,id=qmp,fd={self.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
            *("-chardev", f"ringbuf,id=console,size={RINGBUF}", "-serial", "chardev:console"),
            *("-chardev", f"socket,id=agent,fd={self.agent_fd},server=on,wait=off"),
            *("-device", f"virtio-serial-{self._bus}", "-device", "virtserialport,chardev=agent,name=sandyard.agent"),
            *(part for drive in self.drives for part in self._drive(drive)),
            *self._network(),
            *self._balloon(),
            *(("-incoming", "defer", "-S") if self.incoming else self._boot()),
        ]

    @property
    def _bus(self) -> str:
        return "device" if self.type == "microvm" else "pci"

    def _memory(self) -> str:
        # Of one that waits for a state nothing is used: what is to be its memory is mapped over it.
        share = "off" if self.incoming else "on"
        return f"memory-backend-memfd,id=ram,size={self.memory_mb}M,share={share}"

    def _boot(self) -> Sequence[str]:
        # A guest that goes on has its kernel in its memory, and never boots again: a reset ends it.
        return ("-kernel", str(self.kernel), "-initrd", str(self.initrd), "-append", self._append())

    def _append(self) -> str:
        # There is no keyboard controller that could reset it: a panic ends in a triple fault, which QEMU sees.
        # Elsewhere there is a timer (HPET) which the kernel leaves ticking, and whose registers the agent is to reach.
        # Nowhere it is to be tried whether a timer ticks: on a busy host the kernel gives up too early.
        own = "tsc=reliable no_timer_check reboot=t" if self.type == "microvm" else "no_timer_check iomem=relaxed"
        return f"console=ttyS0 quiet panic=-1 rdinit=/sandyard-agent random.trust_cpu=on {own}"

    def _drive(self, drive: Drive | Absent) -> Sequence[str]:
        nodes = drive.nodes()
        opened = (part for node in nodes for part in ("-blockdev", json.dumps(node)))
        top, device = nodes[-1]["node-name"], device_of(drive.serial)
        return (*opened, "-device", f"virtio-blk-{self._bus},drive={top},serial={drive.serial},id={device}")

    def _balloon(self) -> Sequence[str]:
        # Through it the guest tells which of its pages are free, and QEMU drops them. What a copy reads there later is
        # not zero but what lies below in its memory's files. A kernel that relies on the content of free pages
        # (init_on_free, page_poison) says so by the feature page-poison, and tells nothing where that is off.
        return ("-device", f"virtio-balloon-{self._bus},free-page-reporting=on,page-poison=off")

    def _network(self) -> Sequence[str]:
        if not self.tap:
            return ()
        options = ",rombar=0" if self._bus == "pci" else ""
        backend = f"tap,id=net,ifname={TAP},script=no,downscript=no,vhost=off"
        return ("-netdev", backend, "-device", f"virtio-net-{self._bus},netdev=net{options}")
