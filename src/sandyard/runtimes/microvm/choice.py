"""Which accelerator works on this host, found out by booting a guest with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sandyard.config import MicroVMSettings, Settings
from sandyard.errors import HostError
from sandyard.runtimes.container.layout import boot_id, read_json, write_json
from sandyard.runtimes.microvm.assets import MANIFEST, Assets
from sandyard.runtimes.microvm.layout import Layout
from sandyard.runtimes.microvm.machine import Accel

KVM = Path("/dev/kvm")
OLDEST = [7, 2]
"""Of QEMU; with an earlier one guests may boot or not."""
_VERSION_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Engine:
    """QEMU as it is on this host."""

    path: str
    version: str


@dataclass(frozen=True, slots=True)
class Choice:
    engine: Engine
    assets: Assets
    accel: Accel
    boot_seconds: float  # of a guest without disks, when it was tried


def find_engine(settings: Settings) -> Engine:
    """Raises `HostError`."""
    path = shutil.which(settings.microvm.qemu)
    if path is None:
        remedy = "run: sandyard setup microvm (or apt-get install qemu-system-x86 qemu-utils)"
        named = settings.microvm.qemu
        if named == MicroVMSettings().qemu:
            raise HostError(f"no {named} on this host", remedy=remedy)
        remedy = "set microvm.qemu to QEMU, or leave it out"
        raise HostError(f"no program {named} on this host", remedy=remedy)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, check=False, timeout=_VERSION_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(f"{path} --version: {error}", remedy="set microvm.qemu to QEMU") from error
    said = done.stdout.decode(errors="replace")
    words = said.partition("QEMU emulator version ")[2].split()
    if not words:
        first = said.strip().partition("\n")[0][:80]
        raise HostError(f"{path} --version says {first!r}", remedy="set microvm.qemu to QEMU")
    return Engine(path, words[0])


def tried(version: str) -> bool:
    """Whether QEMU is not older than what guests were tried with."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return len(numbers) < 2 or numbers >= OLDEST


def traces(settings: Settings) -> Sequence[object]:
    """What is another one when QEMU or what guests boot from was exchanged. A few microseconds."""
    return [_trace(path) for path in (shutil.which(settings.microvm.qemu), Layout.of(settings).assets / MANIFEST)]


def _trace(path: Path | str | None) -> object:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return path, None
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def candidates(settings: Settings) -> list[Accel]:
    """What is to be tried, in this order. Raises `HostError` where that cannot be."""
    wanted = settings.microvm.accel
    if wanted == "kvm" and not KVM.exists():
        remedy = "turn on virtualisation and load its module, or set microvm.accel = auto: guests then run in software"
        raise HostError(f"microvm.accel is kvm, and there is no {KVM} on this host", remedy=remedy)
    if wanted != "auto":
        return [wanted]
    return ["kvm", "tcg"] if KVM.exists() else ["tcg"]


def remembered(layout: Layout, engine: Engine, assets: Assets, allowed: list[Accel]) -> tuple[Accel, float] | None:
    """What was found since the host booted, with the same QEMU and kernel."""
    record = read_json(layout.assets / "accel.json")
    if record is None or record.get("key") != _key(engine, assets) or record.get("accel") not in allowed:
        return None
    return record["accel"], float(record["boot_seconds"])


async def remember(layout: Layout, choice: Choice) -> None:
    record = {"key": _key(choice.engine, choice.assets), "accel": choice.accel, "boot_seconds": choice.boot_seconds}
    await asyncio.to_thread(write_json, layout.assets / "accel.json", record)


def _key(engine: Engine, assets: Assets) -> str:
    return f"{boot_id()} {engine.path} {engine.version} {assets.digest}"
