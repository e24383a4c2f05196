"""Suspend and wake: a sandbox's memory brought to the disk, its VMM ended, and started from there again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import structlog

from sandyard.errors import CreateFailed, GuestError, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import commits, conf, disk, shortening
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.disks import MOST, Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.memory import image, suspended
from sandyard.runtimes.microvm.memory.capture import Capture
from sandyard.runtimes.microvm.memory.image import Manifest
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.sharing import share
from sandyard.runtimes.microvm.memory.suspended import Suspended
from sandyard.runtimes.microvm.starting import CONF

log = structlog.get_logger("sandyard.microvm")


class Suspending:
    """Of `host`. Whoever calls holds the sandbox's lock."""

    def __init__(self, host: Host, restorer: Restorer) -> None:
        self._host = host
        self._restorer = restorer

    async def suspend(self, instance: MicroVMInstance) -> None:
        """`Runtime.suspend` of one that runs, or stands still."""
        spec, layout = instance.spec, self._host.layout
        name = await ended(suspended.next_image, layout, spec.sandbox_id)
        await shortening.settle(self._host, instance, call_off=True)
        record = Suspended(spec, name, await ended(Disks(layout, spec).top))
        await finish(self._suspend(instance, record))
        await finish(self._host.end(spec.sandbox_id))
        await ended(suspended.tidy, layout, record)
        await finish(self._shorten(record))

    async def _suspend(self, instance: MicroVMInstance, record: Suspended) -> None:
        layout, ran = self._host.layout, not instance.paused
        name = layout.memory(record.spec.sandbox_id) / record.image
        capture = await Capture.prepare(self._host, instance, name)
        try:
            if ran:
                await instance.stand_still()
            await capture.take()
            conf_bytes = conf.bytes_of(layout.kept(record.spec.sandbox_id) / CONF)
            manifest = await ended(lambda: capture.write(record.spec.hostname, conf_bytes, None, durable=True))
            await ended(lambda: image.save(name, manifest, durable=True))
            await ended(self._restorer.trust, name, manifest)
            await ended(suspended.save, layout, record)
        except BaseException as error:
            await ended(suspended.forget, layout, record.spec.sandbox_id)  # it may be there, and not on the disk
            await ended(image.remove, name)
            if ran:
                await instance.go_on()
            if isinstance(error, OSError):
                raise SandboxError(f"sandbox {record.spec.sandbox_id} could not be suspended: {error}") from error
            raise

    async def _shorten(self, record: Suspended) -> None:
        """Let its disk take no more than it needs, and be one image again where it never ran for long enough."""
        disks, number = Disks(self._host.layout, record.spec), record.disk + 1
        try:
            await ended(lambda: disks.prune(ended=True))
            if await ended(disks.depth) < MOST:
                return
            await commits.commit_halted(self._host, record.spec, disks.kept / disk.image(number), record.disk)
            await ended(suspended.save, self._host.layout, replace(record, disk=number))
            await ended(lambda: disks.prune(ended=True))
        except (SandboxError, OSError) as error:  # it is suspended all the same
            log.warning("the images of a sandbox stay a chain", sandbox=record.spec.sandbox_id, error=str(error))

    async def wake(self, choice: Choice, spec: SandboxSpec) -> MicroVMInstance:
        """`Runtime.wake`."""
        layout, sandbox_id = self._host.layout, spec.sandbox_id
        record = suspended.load(layout, sandbox_id)
        if record is None:
            raise CreateFailed("snapshot", f"sandbox {sandbox_id} is not suspended")
        name = layout.memory(sandbox_id) / record.image
        manifest = await self._restorer.fitting(choice, spec, name)
        await finish(self._host.end(sandbox_id))  # of a start that failed, or of a suspend that was not finished
        await ended(suspended.tidy, layout, record)
        try:
            await ended(self._new_image, record)
            instance = await self._restorer.start(choice, spec, name, manifest)
            await instance.agent.freeze(False)
            await ended(suspended.forget, layout, sandbox_id)
            await self._settle(sandbox_id)
            await shortening.begin(self._host, instance)
            return instance
        except (SandboxError, GuestError, OSError) as error:
            await finish(self._host.end(sandbox_id))
            await ended(suspended.tidy, layout, record)
            if isinstance(error, CreateFailed):
                raise
            raise CreateFailed("restore", str(error)) from error
        except BaseException:
            try:
                await ended(suspended.save, layout, record)  # it was forgotten already where that is called off
            finally:
                await finish(self._host.end(sandbox_id))
            raise

    def _new_image(self, record: Suspended) -> None:
        """What it wrote until now can be kept as it is: its VMM is gone."""
        disks = Disks(self._host.layout, record.spec)
        disks.sweep()
        disks.keep(record.disk, ended=True)
        disks.prune(ended=True)
        disks.add()

    async def _settle(self, sandbox_id: str) -> None:
        """That it runs again is to be known also after the host broke down: it is not to be woken a second time."""
        try:
            await ended(sync, self._host.layout.memory(sandbox_id))
        except OSError as error:  # it runs all the same, and has nothing else to go on from any more
            log.warning("that a sandbox was woken is not on the disk yet", sandbox=sandbox_id, error=str(error))

    def get(self, sandbox_id: str) -> Suspended | None:
        return suspended.load(self._host.layout, sandbox_id)

    async def commit(self, record: Suspended, target: Path) -> int:
        """`Runtime.commit_halted` with memory. Raises `SandboxError`."""
        name = self._host.layout.memory(record.spec.sandbox_id) / record.image

        def linked() -> Manifest:
            manifest = image.load(name)
            image.link(name, manifest, target)
            return manifest

        await ended(image.check_new, target)
        try:
            manifest = await ended(linked)
            await share(self._host, record.spec, record.disk, target, manifest, halted=True, durable=True)
            # What it alone shares with the sandbox stays when that goes on.
            return await ended(image.taken, target, 2)
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await ended(image.remove_half, target)

    async def forget(self, sandbox_id: str) -> None:
        """Nothing of its memory is left; it has no VMM."""
        await asyncio.to_thread(remove_tree, self._host.layout.memory(sandbox_id))
