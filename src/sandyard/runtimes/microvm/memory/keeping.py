"""What the microVM runtime does with memory: sandboxes made by restoring, and snapshots of them."""

from __future__ import annotations

from pathlib import Path

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import commits, conf
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.bases import Bases
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.checking import seal
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.restore import Restorer, without_layer
from sandyard.runtimes.microvm.memory.suspending import Suspending
from sandyard.runtimes.microvm.starting import split_layers


class Keeping:
    """Of `host`. Whoever calls holds the sandbox's lock."""

    def __init__(self, host: Host, bring_up: BringUp) -> None:
        self._host = host
        self._bring_up = bring_up
        self._restorer = Restorer(host, bring_up)
        self._bases = Bases(host, bring_up, self._restorer)
        self._compactor = Compactor(self._restorer.trust_last)
        self.suspending = Suspending(host, self._restorer, self._compactor)

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
        manifest = await self._restorer.fitting(choice, below, layer)
        return await self._restorer.copy(choice, below, layer, manifest)

    async def commit(self, instance: MicroVMInstance, target: Path, parent: Path | None, *, durable: bool) -> int:
        """`Instance.commit` with memory."""
        spec = instance.spec
        commits.check_depth(spec)
        await ended(image.check_new, target)
        capture = await Capture.prepare(self._host, instance, target)
        swap = await commits.Swap.prepare(self._host, instance)
        try:
            await finish(self._take(instance, capture, swap))
            conf_bytes = conf.bytes_of(self._host.layout.disk(spec.sandbox_id) / "conf.img")
            manifest = await ended(lambda: capture.write(spec.hostname, conf_bytes, parent, durable=durable))
            size = await commits.flatten(self._host, spec, swap.number, target, durable)
            sealed = await ended(lambda: seal(target, manifest, durable=durable))
            await ended(self._restorer.trust, target, sealed)
            await commits.shorten(self._host, instance)
            size += await ended(image.taken, target)
            if durable:  # what is to go again soon is not worth it
                self._compactor.soon(target, capture.floor)
            return size
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await ended(image.remove_half, target)

    async def remove(self, sandbox_id: str) -> None:
        """`Host.remove`."""
        await self._compactor.leave(self._host.layout.memory(sandbox_id))
        await self._host.remove(sandbox_id)

    async def close(self) -> None:
        """Let go of what works in the background."""
        await self._compactor.close()

    async def _take(self, instance: MicroVMInstance, capture: Capture, swap: commits.Swap) -> None:
        """Memory, devices and disk of one instant; then it goes on, if it ran."""
        try:
            try:
                if not instance.paused:
                    await instance.stand_still()
                await capture.take()
            except BaseException:
                swap.drop()
                raise
            await swap.do()
        finally:
            if not instance.paused:
                await instance.go_on()
