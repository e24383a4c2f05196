"""Commits of a microVM's files: its image is exchanged for one above it, and written out as a layer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import SandboxError, SandyardError, Unsupported
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import disk, shortening
from sandyard.runtimes.microvm.cgroup import VmLimits, make_groups, tool_group
from sandyard.runtimes.microvm.disks import MOST, Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import STOP_TIMEOUT, MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN, VmStart, run_confined
from sandyard.runtimes.microvm.qcow2 import nested
from sandyard.runtimes.microvm.qmp import QmpError
from sandyard.runtimes.microvm.starting import LAYER_FILES_MAX
from sandyard.runtimes.microvm.users import make_home

_TIMEOUT = 600.0
_MADE = "layer.qcow2"
_TOOL = VmLimits(memory_bytes=512 << 20, cpu=1.0)


async def commit(host: Host, instance: MicroVMInstance, target: Path, *, durable: bool) -> int:
    """`Instance.commit`. The guest's disk stands still while its image is exchanged for one above it."""
    spec = instance.spec
    check_depth(spec)
    swap = await Swap.prepare(host, instance)
    await finish(_exchange(instance, swap))
    try:
        # What a tool opens must not change under it: a header may name any file.
        await ended(lambda: Disks(host.layout, spec).keep(swap.number, ended=False))
        return await flatten(host, spec, swap.number, target, durable)
    finally:
        await shortening.begin(host, instance)


async def commit_halted(host: Host, spec: SandboxSpec, target: Path, number: int | None = None) -> int:
    """`Runtime.commit_halted`; `number` of its image, the topmost where none is given."""
    check_depth(spec)
    home = host.layout.home(spec.sandbox_id)
    home.mkdir(mode=0o700, exist_ok=True)
    try:
        number = Disks(host.layout, spec).top() if number is None else number
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
    """The exchange of the image a guest writes to: `number` gets a new one, `path`, above it. What makes few of its
    images stands still for it, by its id, until `end`."""

    instance: MicroVMInstance
    number: int
    path: Path
    held: str | None = None

    @classmethod
    async def prepare(cls, host: Host, instance: MicroVMInstance) -> Swap:
        """Make the image, which belongs to nobody yet; `end` is due. Raises `Unsupported`, `SandboxError`."""
        held = await shortening.make_way(host, instance)

        def make() -> Swap:
            disks = Disks(host.layout, instance.spec)
            disks.sweep()
            if disks.depth() > 2 * MOST:
                raise SandboxError(
                    f"sandbox {instance.spec.sandbox_id}: the images of its disk are too many, and are not made one",
                    remedy="free disk space on the host",
                )
            return cls(instance, disks.top(), disks.add(), held)

        try:
            return await ended(make)
        except BaseException:
            await shortening.go_on(instance, held)
            raise

    async def end(self) -> None:
        """It was done or dropped, and the guest goes on."""
        with suppress(SandboxError):  # its VMM is gone, or the next `shortening.begin` tells it
            await shortening.go_on(self.instance, self.held)

    def drop(self) -> None:
        """It is not needed."""
        self.path.unlink(missing_ok=True)

    async def do(self) -> None:
        """Nothing may be on its way to the disk. Raises `SandboxError`: the image is gone then where QEMU refused it.
        Else QEMU may still come to write to it, so it stays; empty it reads as what lies below."""
        try:
            writing = await self.instance.disk_node()
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
        await swap.end()
        raise
    try:
        await swap.do()
    finally:
        if not instance.paused:
            with suppress(SandyardError):
                await instance.agent.freeze(False)
        await swap.end()


async def flatten(host: Host, spec: SandboxSpec, number: int, target: Path, durable: bool) -> int:
    """Write image `number` of a sandbox, which no VMM writes to, and all below it as the layer `target`; its bytes.
    Raises `SandboxError`."""
    return await ended(_flatten, host, spec, number, target, durable)


def _flatten(host: Host, spec: SandboxSpec, number: int, target: Path, durable: bool) -> int:
    """By a tool that is confined as the VMM is, as another user, in a directory of its own."""
    name, disks = tool_group(spec.sandbox_id), Disks(host.layout, spec)
    own, log = host.layout.disk(name), host.layout.home(spec.sandbox_id) / "tool.log"
    host.end_tools(spec.sandbox_id)
    try:
        images, shared = disks.lent(number)
        groups = make_groups(host.cgroups, name, _TOOL)
        plan = VmStart(own, make_home(host.layout, own), groups, shared, log, file_bytes=disks.most)
        made = disk.to_be_written(own, _MADE)
        command = ["qemu-img", "convert", "-U", "-O", "qcow2", nested(images), str(OWN / made.name)]
        run_confined(plan, command, _TIMEOUT)
        return disk.take(made, target, durable)
    except OSError as error:
        raise SandboxError(f"commit to {target}: {error}") from error
    finally:
        host.end_tools(spec.sandbox_id)
