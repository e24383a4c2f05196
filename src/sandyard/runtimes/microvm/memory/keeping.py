"""What the microVM runtime does with memory: sandboxes made by restoring, snapshots, suspended ones."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import structlog

from sandyard.errors import CreateFailed, GuestError, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.container.runtime import finish
from sandyard.runtimes.microvm import commits, disk
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.host import Host, in_thread
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, suspended
from sandyard.runtimes.microvm.memory.bases import Bases
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.fitting import fit_of
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.restore import Restorer, without_layer
from sandyard.runtimes.microvm.memory.suspended import Suspended
from sandyard.runtimes.microvm.starting import split_layers

log = structlog.get_logger("sandyard.microvm")


class Keeping:
    """Of `host`. Whoever calls holds the sandbox's lock."""

    def __init__(self, host: Host, bring_up: BringUp) -> None:
        self._host = host
        self._bring_up = bring_up
        self._restorer = Restorer(host, bring_up)
        self._bases = Bases(host, bring_up, self._restorer)

    async def create(self, choice: Choice, spec: SandboxSpec) -> MicroVMInstance:
        """A copy of the memory it is to have, or of a base; only on files that were committed without memory it
        boots. Raises `CreateFailed`; what was made is left."""
        if spec.memory is not None:
            return await self._copy(choice, spec, spec.memory)
        if split_layers(spec.rootfs.layers)[1]:
            return await self._bring_up.start(choice, spec, used=False)
        layer, manifest = await self._bases.get(choice, spec)
        return await self._restorer.copy(choice, spec, layer, manifest)

    async def _copy(self, choice: Choice, spec: SandboxSpec, layer: Path) -> MicroVMInstance:
        if not spec.rootfs.layers or layer != spec.rootfs.layers[0]:
            raise CreateFailed("snapshot", f"the memory of {layer.name} goes with its files, which are not on top")
        below = without_layer(spec)
        manifest = await self._fitting(choice, below, layer)
        return await self._restorer.copy(choice, below, layer, manifest)

    async def _fitting(self, choice: Choice, spec: SandboxSpec, name: Path) -> Manifest:
        """The manifest of an image that fits. Raises `CreateFailed("snapshot")`; nothing was touched."""

        def look() -> Manifest:
            manifest = image.load(name)
            manifest.fit.check(fit_of(self._host, choice, spec, part(name, "base")), name)
            self._restorer.check(name, manifest)
            return manifest

        try:
            return await in_thread(look)
        except OSError as error:
            raise CreateFailed("snapshot", f"the memory of {name.name} is not whole: {error}") from error
        except Unfit as error:
            raise CreateFailed("snapshot", error.message, remedy=error.remedy) from error

    async def commit(
        self, choice: Choice, instance: MicroVMInstance, target: Path, parent: Path | None, *, durable: bool
    ) -> int:
        """`Instance.commit` with memory."""
        spec = instance.spec
        commits.check_depth(spec)
        capture = await self._capture(choice, instance, target)
        swap = await commits.Swap.prepare(self._host, instance)
        try:
            await finish(self._take(instance, capture, swap))
            conf_bytes = (self._host.layout.disk(spec.sandbox_id) / "conf.img").stat().st_size
            await in_thread(lambda: capture.write(spec.hostname, conf_bytes, parent, durable=durable))
            size = await commits.flatten(self._host, spec, swap.number, target, durable)
            await commits.shorten(self._host, instance)
            return size + await in_thread(image.taken, target)
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await in_thread(_drop_half, target)

    async def _take(self, instance: MicroVMInstance, capture: Capture, swap: commits.Swap) -> None:
        """Memory, devices and disk of one instant; then it goes on, if it ran."""
        try:
            if not instance.paused:
                await instance.agent.freeze(True, processes=True)
                await instance.control.execute("stop")
            await capture.take()
            await swap.do()
        except BaseException:
            swap.drop()
            raise
        finally:
            if not instance.paused:
                await instance.control.execute("cont")
                await instance.agent.freeze(False)

    async def suspend(self, choice: Choice, instance: MicroVMInstance) -> None:
        """`Runtime.suspend` of one that runs, or stands still."""
        spec, layout = instance.spec, self._host.layout
        name = await in_thread(suspended.next_image, layout, spec.sandbox_id)
        record = Suspended(spec, name, disk.top(layout.disk(spec.sandbox_id)))
        await finish(self._suspend(choice, instance, record))
        await finish(self._host.end(spec.sandbox_id))
        await in_thread(suspended.tidy, layout, record)
        await finish(self._shorten(record))

    async def _suspend(self, choice: Choice, instance: MicroVMInstance, record: Suspended) -> None:
        layout, ran = self._host.layout, not instance.paused
        name = layout.memory(record.spec.sandbox_id) / record.image
        capture = await self._capture(choice, instance, name)
        try:
            if ran:
                await instance.agent.freeze(True, processes=True)
                await instance.control.execute("stop")
            await capture.take()
            conf_bytes = (layout.disk(record.spec.sandbox_id) / "conf.img").stat().st_size
            await in_thread(lambda: capture.write(record.spec.hostname, conf_bytes, None, durable=True))
            await in_thread(suspended.save, layout, record)
        except BaseException as error:
            await in_thread(suspended.forget, layout, record.spec.sandbox_id)  # it may be there, and not on the disk
            await in_thread(image.remove, name)
            if ran:
                await instance.control.execute("cont")
                await instance.agent.freeze(False)
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox {record.spec.sandbox_id} could not be suspended: {error}") from error
            raise

    async def _shorten(self, record: Suspended) -> None:
        """Make its disk one image again where it has become a long chain of them."""
        own = self._host.layout.disk(record.spec.sandbox_id)
        if await in_thread(disk.depth, own) < disk.DEEPEST:
            return
        number = record.disk + 1
        try:
            await commits.commit_halted(self._host, record.spec, own / disk.image(number), record.disk)
            await in_thread(suspended.save, self._host.layout, replace(record, disk=number))
            await in_thread(disk.keep_only, own, number)
        except (SandboxError, OSError) as error:  # it is suspended all the same
            log.warning("the images of a sandbox stay a chain", sandbox=record.spec.sandbox_id, error=str(error))

    async def wake(self, choice: Choice, spec: SandboxSpec) -> MicroVMInstance:
        """`Runtime.wake`."""
        layout, sandbox_id = self._host.layout, spec.sandbox_id
        record = suspended.load(layout, sandbox_id)
        if record is None:
            raise CreateFailed("snapshot", f"sandbox {sandbox_id} is not suspended")
        name, own = layout.memory(sandbox_id) / record.image, layout.disk(sandbox_id)
        manifest = await self._fitting(choice, spec, name)
        await finish(self._host.end(sandbox_id))  # of a start that failed, or of a suspend that was not finished
        await in_thread(suspended.tidy, layout, record)
        try:
            size = (own / disk.BLANK).stat().st_size
            await in_thread(disk.above, own, disk.image(record.disk), "qcow2", size, record.disk + 1)
            instance = await self._restorer.start(choice, spec, name, manifest)
            await instance.agent.freeze(False)
            await in_thread(suspended.forget, layout, sandbox_id)
            return instance
        except (SandboxError, GuestError, OSError) as error:
            await finish(self._host.end(sandbox_id))
            await in_thread(suspended.tidy, layout, record)
            if isinstance(error, CreateFailed):
                raise
            raise CreateFailed("restore", str(error)) from error
        except BaseException:
            await finish(self._host.end(sandbox_id))
            raise

    def suspended(self, sandbox_id: str) -> Suspended | None:
        return suspended.load(self._host.layout, sandbox_id)

    async def commit_suspended(self, record: Suspended, target: Path) -> int:
        """`Runtime.commit_halted` with memory. Raises `SandboxError`."""
        name = self._host.layout.memory(record.spec.sandbox_id) / record.image

        def share() -> None:
            manifest = image.load(name)
            image.link(name, manifest, target)
            image.save(target, replace(manifest), durable=True)

        try:
            await in_thread(share)
            size = await commits.commit_halted(self._host, record.spec, target, number=record.disk)
            return size + await in_thread(image.taken, target)
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await in_thread(_drop_half, target)

    async def forget(self, sandbox_id: str) -> None:
        """Nothing of its memory is left; it has no VMM."""
        await asyncio.to_thread(remove_tree, self._host.layout.memory(sandbox_id))

    async def _capture(self, choice: Choice, instance: MicroVMInstance, name: Path) -> Capture:
        spec = instance.spec
        fit = await in_thread(lambda: fit_of(self._host, choice, spec, self._host.layout.block(spec.sandbox_id)))
        return Capture(self._host, instance, name, fit)


def _drop_half(target: Path) -> None:
    """The layer itself comes last: without it nothing is left."""
    if not target.exists():
        image.remove(target)
