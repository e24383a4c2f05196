"""What the microVM runtime does with memory: sandboxes made by restoring, and snapshots of them."""

from __future__ import annotations

from pathlib import Path

from sandyard.errors import CreateFailed, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import commits, conf, shortening
from sandyard.runtimes.microvm.bringup import BringUp
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, merging
from sandyard.runtimes.microvm.memory.bases import Bases
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.image import Manifest
from sandyard.runtimes.microvm.memory.inject import Mapper
from sandyard.runtimes.microvm.memory.restore import Restorer, without_layer
from sandyard.runtimes.microvm.memory.sharing import share
from sandyard.runtimes.microvm.memory.suspended import next_image
from sandyard.runtimes.microvm.memory.suspending import Suspending
from sandyard.runtimes.microvm.record import load_below
from sandyard.runtimes.microvm.starting import CONF


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
        """A copy of the memory it is to have, or of a base. Raises `CreateFailed`; what was made is left."""
        if spec.memory is not None:
            return await self._copy(choice, spec, spec.memory)
        layer, manifest = await self._bases.get(choice, spec)
        return await self._restorer.copy(choice, spec, layer, manifest)

    async def _copy(self, choice: Choice, spec: SandboxSpec, layer: Path) -> MicroVMInstance:
        if not spec.rootfs.layers or layer != spec.rootfs.layers[0]:
            raise CreateFailed("snapshot", f"the memory of {layer.name} goes with its files, which are not on top")
        below = without_layer(spec)
        manifest = await self._restorer.fitting(choice, below, layer)
        return await self._restorer.copy(choice, below, layer, manifest)

    async def commit(self, instance: MicroVMInstance, target: Path, *, durable: bool) -> int:
        """`Instance.commit` with memory. The guest goes on above what was taken of it, as an image of its own."""
        spec = instance.spec
        commits.check_depth(spec)
        await ended(image.check_new, target)
        await self._compactor.leave(self._host.layout.memory(spec.sandbox_id))
        own = self._host.layout.memory(spec.sandbox_id) / await ended(next_image, self._host.layout, spec.sandbox_id)
        capture = await Capture.prepare(self._host, instance, own)
        swap = await commits.Swap.prepare(self._host, instance)
        try:
            await finish(self._take(instance, capture, swap))
            manifest = await ended(self._write, spec, capture, own, target, durable)
            sealed = await share(self._host, spec, swap.number, target, manifest, halted=False, durable=durable)
            await ended(self._restorer.trust, target, sealed)
            size = await ended(image.taken, target, 2)
            if durable:  # what is to go again soon is not worth it
                self._compactor.soon(target, capture.floor)
            if capture.rebased is not None:  # the next one has its parts from there
                self._compactor.soon(own, merging.KEPT)
            return size
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await ended(image.remove_half, target)
            await ended(self._keep_below, spec)
            await shortening.begin(self._host, instance)

    async def remove(self, sandbox_id: str) -> None:
        """`Host.remove`."""
        await self._compactor.leave(self._host.layout.memory(sandbox_id))
        await self._host.remove(sandbox_id)

    async def close(self) -> None:
        """Let go of what works in the background."""
        await self._compactor.close()

    async def _take(self, instance: MicroVMInstance, capture: Capture, swap: commits.Swap) -> None:
        try:
            mapper = await ended(Mapper)  # before it stands still
        except BaseException:
            swap.drop()
            await swap.end()
            raise
        try:
            await self._take_still(instance, capture, swap, mapper)
        finally:
            await swap.end()
            await ended(mapper.close)
        await capture.release()

    async def _take_still(
        self, instance: MicroVMInstance, capture: Capture, swap: commits.Swap, mapper: Mapper
    ) -> None:
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
            await capture.rebase(mapper)
        finally:
            if not instance.paused:
                await instance.go_on()

    def _write(self, spec: SandboxSpec, capture: Capture, own: Path, target: Path, durable: bool) -> Manifest:
        conf_bytes = conf.bytes_of(self._host.layout.kept(spec.sandbox_id) / CONF)
        image.save(own, capture.write(spec.hostname, conf_bytes, durable=durable), durable=False)
        return image.share(own, target)

    def _keep_below(self, spec: SandboxSpec) -> None:
        """Of its own images only the one that it goes on above is needed; while that is not whole, all of them."""
        home, name = self._host.layout.memory(spec.sandbox_id), load_below(self._host.layout.home(spec.sandbox_id))
        if not name or image.exists(home / name):
            image.keep_only(home, name)
