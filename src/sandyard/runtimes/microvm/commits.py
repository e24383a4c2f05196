"""Commits of a microVM's files: its image is exchanged for one above it, and written out as a layer."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from pathlib import Path

from sandyard.errors import SandboxError, SandyardError, Unsupported
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.container.runtime import finish
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.host import Host, in_thread
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN, run_confined
from sandyard.runtimes.microvm.starting import LAYER_FILES_MAX

_TIMEOUT = 600.0


async def commit(host: Host, instance: MicroVMInstance, target: Path, *, durable: bool) -> int:
    """`Instance.commit`. The guest's disk stands still while its image is exchanged for one above it."""
    spec = instance.spec
    check_depth(spec)
    own = host.layout.disk(spec.sandbox_id)
    number = disk.top(own)
    if number + 1 >= disk.DEEPEST:
        raise Unsupported(f"sandbox {spec.sandbox_id} was committed {number} times; no more is possible")
    await finish(exchange(instance, own, number))
    return await _flatten(host, spec, number, target, durable)


async def commit_halted(host: Host, spec: SandboxSpec, target: Path) -> int:
    """`Runtime.commit_halted`."""
    check_depth(spec)
    home = host.layout.home(spec.sandbox_id)
    home.mkdir(mode=0o700, exist_ok=True)
    try:
        return await _flatten(host, spec, disk.top(host.layout.disk(spec.sandbox_id)), target, True)
    finally:
        remove_tree(home)


def check_depth(spec: SandboxSpec) -> None:
    """Raises `Unsupported` where no layer can be added."""
    if sum(layer.is_file() for layer in spec.rootfs.layers) >= LAYER_FILES_MAX:
        raise Unsupported(
            f"sandbox {spec.sandbox_id} stands on {LAYER_FILES_MAX} committed layers; no more can be added"
        )


async def exchange(instance: MicroVMInstance, own: Path, number: int) -> None:
    """Let the guest write to image `number + 1` of its directory `own`, above the one it has. Raises `SandboxError`."""
    size = (own / disk.BLANK).stat().st_size
    new = await asyncio.to_thread(disk.above, own, disk.image(number), "qcow2", size, number + 1)
    arguments = {
        "node-name": await _writing(instance),
        "snapshot-file": str(OWN / new.name),
        "snapshot-node-name": f"disk{number + 1}",
        "format": "qcow2",
        "mode": "existing",
    }
    try:
        if not instance.paused:
            await instance.agent.freeze(True)
        try:
            await instance.control.execute("blockdev-snapshot-sync", arguments)
        finally:
            if not instance.paused:
                with suppress(SandyardError):
                    await instance.agent.freeze(False)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


async def _writing(instance: MicroVMInstance) -> str:
    """The name QEMU has for the image the guest writes to."""
    for each in await instance.control.execute("query-block"):
        if str(each.get("qdev", "")).find("dev-disk") >= 0:
            return str(each["inserted"]["node-name"])
    raise SandboxError(f"sandbox {instance.spec.sandbox_id}: its VMM has no disk")


async def _flatten(host: Host, spec: SandboxSpec, number: int, target: Path, durable: bool) -> int:
    own = host.layout.disk(spec.sandbox_id)
    scratch = own / f"layer-{secrets.token_hex(4)}"
    plan = host.starter.plan(spec, (), {})
    source, made = str(OWN / disk.image(number)), str(OWN / scratch.name)
    command = ["qemu-img", "convert", "-U", "-O", "qcow2", source, made]
    try:
        await in_thread(run_confined, plan, command, _TIMEOUT)
        return await in_thread(disk.take, scratch, target, durable)
    finally:
        scratch.unlink(missing_ok=True)
