"""Commits of a microVM's files: its image is exchanged for one above it, and written out as a layer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sandyard.errors import SandboxError, SandyardError, Unsupported
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import STOP_TIMEOUT, MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN, run_confined
from sandyard.runtimes.microvm.qmp import QmpError
from sandyard.runtimes.microvm.starting import LAYER_FILES_MAX

log = structlog.get_logger("sandyard.microvm")

_TIMEOUT = 600.0
_JOB = "shorten"
_POLL = 0.02


async def commit(host: Host, instance: MicroVMInstance, target: Path, *, durable: bool) -> int:
    """`Instance.commit`. The guest's disk stands still while its image is exchanged for one above it."""
    spec = instance.spec
    check_depth(spec)
    swap = await Swap.prepare(host, instance)
    await finish(_exchange(instance, swap))
    size = await flatten(host, spec, swap.number, target, durable)
    await shorten(host, instance)
    return size


async def commit_halted(host: Host, spec: SandboxSpec, target: Path, number: int | None = None) -> int:
    """`Runtime.commit_halted`; `number` of its image, the topmost where none is given."""
    check_depth(spec)
    home = host.layout.home(spec.sandbox_id)
    home.mkdir(mode=0o700, exist_ok=True)
    try:
        number = disk.top(host.layout.disk(spec.sandbox_id)) if number is None else number
        return await flatten(host, spec, number, target, True)
    finally:
        remove_tree(home)


def check_depth(spec: SandboxSpec) -> None:
    """Raises `Unsupported` where no layer can be added."""
    if sum(layer.is_file() for layer in spec.rootfs.layers) >= LAYER_FILES_MAX:
        raise Unsupported(
            f"sandbox {spec.sandbox_id} stands on {LAYER_FILES_MAX} committed layers; no more can be added"
        )


@dataclass(frozen=True, slots=True)
class Swap:
    """The exchange of the image a guest writes to: `number` gets a new one, `path`, above it."""

    instance: MicroVMInstance
    number: int
    path: Path

    @classmethod
    async def prepare(cls, host: Host, instance: MicroVMInstance) -> Swap:
        """Make the image, which belongs to nobody yet. Raises `Unsupported`, `SandboxError`."""
        own = host.layout.disk(instance.spec.sandbox_id)
        number = disk.top(own)
        size = (own / disk.BLANK).stat().st_size
        path = await ended(disk.above, own, disk.image(number), "qcow2", size, number + 1)
        return cls(instance, number, path)

    def drop(self) -> None:
        """It is not needed."""
        self.path.unlink(missing_ok=True)

    async def do(self) -> None:
        """Nothing may be on its way to the disk. Raises `SandboxError`: the image is gone then where QEMU refused it.
        Else QEMU may still come to write to it, so it stays; empty it reads as what lies below."""
        try:
            writing = await _writing(self.instance)
        except BaseException:
            self.drop()
            raise
        arguments = {
            "node-name": writing,
            "snapshot-file": str(OWN / self.path.name),
            "snapshot-node-name": f"disk{self.number + 1}",
            "format": "qcow2",
            "mode": "existing",
        }
        try:
            await self.instance.control.execute("blockdev-snapshot-sync", arguments, timeout=STOP_TIMEOUT)
        except QmpError as error:
            if error.kind:
                self.drop()
            raise


async def _exchange(instance: MicroVMInstance, swap: Swap) -> None:
    """Raises `SandboxError`."""
    try:
        if not instance.paused:
            await instance.agent.freeze(True)
    except BaseException:
        swap.drop()
        raise
    try:
        await swap.do()
    finally:
        if not instance.paused:
            with suppress(SandyardError):
                await instance.agent.freeze(False)


async def shorten(host: Host, instance: MicroVMInstance) -> None:
    """Let the guest's disk be one image again where it has become a long chain of them; the guest goes on meanwhile.
    Where that fails it stays a chain, and is tried again the next time."""
    own = host.layout.disk(instance.spec.sandbox_id)
    if await ended(disk.depth, own) < disk.DEEPEST:
        return
    number = disk.top(own)
    try:
        await instance.control.execute("block-stream", {"job-id": _JOB, "device": await _writing(instance)})
        async with asyncio.timeout(_TIMEOUT):
            while True:
                if not await instance.control.execute("query-block-jobs"):  # done, it is none any more
                    break
                await asyncio.sleep(_POLL)
        for each in await instance.control.execute("query-block"):
            if _is_disk(each) and each["inserted"].get("backing_file_depth") == 0:
                await ended(disk.keep_only, own, number)
    except (SandboxError, TimeoutError) as error:
        log.warning("the images of a sandbox stay a chain", sandbox=instance.spec.sandbox_id, error=str(error))


def _is_disk(block: Mapping[str, Any]) -> bool:
    return "dev-disk" in str(block.get("qdev", ""))


async def _writing(instance: MicroVMInstance) -> str:
    """The name QEMU has for the image the guest writes to."""
    for each in await instance.control.execute("query-block"):
        if _is_disk(each):
            return str(each["inserted"]["node-name"])
    raise SandboxError(f"sandbox {instance.spec.sandbox_id}: its VMM has no disk")


async def flatten(host: Host, spec: SandboxSpec, number: int, target: Path, durable: bool) -> int:
    """Write image `number` of a sandbox and all below it as the layer `target`; its bytes. Raises `SandboxError`."""
    own = host.layout.disk(spec.sandbox_id)
    scratch = own / f"layer-{secrets.token_hex(4)}"
    plan = host.starter.plan(spec, (), {})
    source, made = str(OWN / disk.image(number)), str(OWN / scratch.name)
    command = ["qemu-img", "convert", "-U", "-O", "qcow2", source, made]
    try:
        await ended(run_confined, plan, command, _TIMEOUT)
        return await ended(disk.take, scratch, target, durable)
    finally:
        scratch.unlink(missing_ok=True)
