"""What is checked of layers that microVMs wrote: their disk, and the memory beside it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import Checker
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit
from sandyard.runtimes.microvm.qcow2 import Image, nested

_MAGIC = b"QFI\xfb"  # of a qcow2 image


def is_guests(layer: Path) -> bool:
    """Whether a microVM wrote this file."""
    with layer.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def problem_of(layer: Path, *, deep: bool) -> str | None:
    """What is wrong with a layer that `is_guests`. Deeply, all of its memory is read, and the tables of its disk by
    `qemu-img`, where that is installed. Blocking. Raises `OSError`."""
    try:
        if image.exists(layer):
            _memory(layer, deep=deep)
        disks = image.chain_of(layer)
    except SandboxError as error:
        return error.message
    tool = shutil.which("qemu-img")
    if not deep or tool is None:
        return None
    for path in disks:
        if not image.is_blank(path, layer) and (said := _check(tool, path)):
            return f"qemu-img check of {path.name}: {said}"
    return None


def _check(tool: str, path: Path) -> str:
    """Each image for itself: what its header says of others is not followed."""
    command = [tool, "check", "-q", "-U", nested([Image(path)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return (" ".join(said[-2:]) or f"it ended with {done.returncode}") if done.returncode else ""


def _memory(layer: Path, *, deep: bool) -> None:
    def look(manifest: Manifest) -> None:
        if deep:
            Checker().check(layer, manifest)
            return
        for path in (image.part(layer, "ram"), image.part(layer, "state"), *image.pages_of(layer, manifest)):
            if not path.is_file():
                raise Unfit(f"its memory is not whole: {path.name} is gone")

    image.settled(layer, look)  # its server may compact it meanwhile
