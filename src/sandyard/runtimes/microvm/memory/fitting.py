"""What a guest of this host is made of, as the memory of one has to match it."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.guest.wire import VERSION
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import read_json, write_json
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.images import image_of
from sandyard.runtimes.microvm.kind import vcpus
from sandyard.runtimes.microvm.machine import DEVICES, cpu_model, machine_type
from sandyard.runtimes.microvm.memory.image import Fit
from sandyard.runtimes.microvm.starting import committed, split_layers

_UUID_AT = 1024 + 0x68  # in an ext4 file system
_FIT = "fit.json"


def fit_of(host: Host, choice: Choice, spec: SandboxSpec, block: Path) -> Fit:
    """Of a sandbox of `spec` on the block image `block`, if it is started now. Blocking. Raises `OSError`."""
    return Fit(
        accel=choice.accel,
        machine=f"{machine_type(choice.accel)} (devices {DEVICES})",
        cpu=f"{cpu_model(choice.accel)}{f' ({_host_cpu()})' if choice.accel == 'kvm' else ''}",
        engine=choice.engine.version,
        kernel=f"{choice.assets.version} {choice.assets.digest}",
        vcpus=vcpus(spec.resources.cpu),
        memory_mb=host.starter.memory_mb(spec),
        disk_mb=spec.resources.disk_mb,
        network=spec.network is not None,
        image=_identity(block),
        layers=[_layer(layer) for layer in committed(spec.rootfs.layers)],
        protocol=VERSION,
    )


def save_fit(home: Path, fit: Fit) -> None:
    """Of the VMM that was started in `home`: what is here may be another QEMU or kernel when its memory is taken.
    Blocking. Raises `OSError`."""
    write_json(home / _FIT, asdict(fit))


def load_fit(home: Path) -> Fit:
    """Blocking. Raises `SandboxError` where it cannot be known."""
    record = read_json(home / _FIT)
    try:
        return Fit(**record or {})
    except TypeError as error:  # of another version of Sandyard, some of which kept none
        remedy = "commit its files without memory, or destroy it"
        message = f"it is not known what sandbox {home.name} was made on: its memory cannot be taken"
        raise SandboxError(message, remedy=remedy) from error


def block_of(host: Host, spec: SandboxSpec) -> Path:
    """The block image of what it starts from, made if need be. Blocking. Raises `CreateFailed`."""
    return image_of(split_layers(spec.rootfs.layers)[0], host.layout.images, host.layout.uid_base)


def _layer(path: Path) -> str:
    """Its name alone could be another one's, somewhere else or later."""
    found = path.stat()
    return f"{path.name} of {found.st_size} bytes, {found.st_mtime_ns}"


def _identity(block: Path) -> str:
    """A block image that is made again from the same files is another one to a guest that has it mounted."""
    with open(block, "rb") as file:
        file.seek(_UUID_AT)
        return str(uuid.UUID(bytes=file.read(16)))


def _host_cpu() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"
