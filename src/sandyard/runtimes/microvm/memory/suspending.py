"""Suspend and wake: a sandbox's memory brought to the disk, its VMM ended, and started from there again."""

from __future__ import annotations

import asyncio
import errno
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from sandyard.errors import CreateFailed, GuestError, HostFull, SandboxError, SandyardError
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
from sandyard.runtimes.microvm.memory.compaction import Compactor
from sandyard.runtimes.microvm.memory.restore import Restorer
from sandyard.runtimes.microvm.memory.sharing import share
from sandyard.runtimes.microvm.memory.suspended import Suspended
from sandyard.runtimes.microvm.starting import CONF

log = structlog.get_logger("sandyard.microvm")

_NO_ROOM = 16 << 20


class Suspending:
    """Of `host`. Whoever calls holds the sandbox's lock."""

    def __init__(self, host: Host, restorer: Restorer, compactor: Compactor) -> None:
        self._host = host
        self._restorer = restorer
        self._compactor = compactor

    async def suspend(self, instance: MicroVMInstance) -> None:
        """`Runtime.suspend` of one that runs, or stands still."""
        spec, layout = instance.spec, self._host.layout
        try:
            name = await ended(suspended.next_image, layout, spec.sandbox_id)
            await self._compactor.leave(layout.memory(spec.sandbox_id))
            await shortening.call_off(self._host, instance)
            record = Suspended(spec, name, await ended(Disks(layout, spec).top))
            await finish(self._end(instance, record))
        except (SandboxError, OSError) as error:
            raise await ended(self._why, spec.sandbox_id, error) from error
        self._compactor.soon(layout.memory(spec.sandbox_id) / name)
        await finish(self._shorten(record))

    def _why(self, sandbox_id: str, error: SandboxError | OSError) -> SandboxError:
        """QEMU says it in words only if a device state does not find room."""
        if isinstance(error, HostFull):
            return error
        room = shutil.disk_usage(self._host.layout.assets).free
        if room < _NO_ROOM or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return HostFull(
                f"sandbox {sandbox_id} could not be suspended, {room >> 20} MiB are free on the host's disk: {error}",
                remedy="free space below paths.state and try again: it runs on",
            )
        return error if isinstance(error, SandboxError) else SandboxError(f"sandbox {sandbox_id}: {error}")

    async def _end(self, instance: MicroVMInstance, record: Suspended) -> None:
        """Once it is suspended nothing of its VMM stays, whoever calls that off."""
        await self._suspend(instance, record)
        await self._host.end(record.spec.sandbox_id)
        await ended(suspended.tidy, self._host.layout, record)

    async def _suspend(self, instance: MicroVMInstance, record: Suspended) -> None:
        layout, ran = self._host.layout, not instance.paused
        name = layout.memory(record.spec.sandbox_id) / record.image
        capture = await Capture.prepare(self._host, instance, name)
        try:
            if ran:
                await instance.stand_still()
            await capture.take()
            conf_bytes = conf.bytes_of(layout.kept(record.spec.sandbox_id) / CONF)
            manifest = await ended(lambda: capture.write(record.spec.hostname, conf_bytes, durable=True))
            await ended(lambda: image.save(name, manifest, durable=True))
            await ended(self._restorer.trust, name, manifest)
            await ended(suspended.save, layout, record)
        except BaseException:
            await ended(suspended.forget, layout, record.spec.sandbox_id)  # it may be there, and not on the disk
            await ended(image.remove, name)
            if ran:
                with suppress(SandyardError):  # it is tried until it does; what came first says more
                    await instance.go_on()
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
        await self._compactor.leave(name.parent)
        manifest = await self._restorer.fitting(choice, spec, name)
        await finish(self._host.end(sandbox_id))  # of a start that failed, or of a suspend that was not finished
        try:
            await ended(suspended.tidy, layout, record)
            await ended(self._new_image, record)
            instance = await self._restorer.start(choice, spec, name, manifest)
            instance.frozen = True
            await instance.thaw()
            await ended(suspended.forget, layout, sandbox_id)
            await self._settle(sandbox_id)
            await shortening.begin(self._host, instance)
            self._compactor.soon(name)  # nothing is opened by the names of its files any more
            return instance
        except (SandboxError, GuestError, OSError) as error:
            await finish(self._host.end(sandbox_id))
            with suppress(OSError):  # the next one begins with it
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

        await ended(image.check_new, target)
        try:
            manifest = await ended(image.share, name, target)
            await share(self._host, record.spec, record.disk, target, manifest, halted=True, durable=True)
            # What it alone shares with the sandbox stays when that goes on.
            return await ended(image.taken, target, 2)
        except OSError as error:
            raise SandboxError(f"commit to {target}: {error}") from error
        finally:
            await ended(image.remove_half, target)

    async def forget(self, sandbox_id: str) -> None:
        """Nothing of its memory is left; it has no VMM."""
        await self._compactor.leave(self._host.layout.memory(sandbox_id))
        await asyncio.to_thread(remove_tree, self._host.layout.memory(sandbox_id))
