"""A guest's disk that has become a long chain of images is made one again while the guest runs.

QEMU brings what lies below to the image that is written to, which then says of itself that nothing lies below; at
every moment until then the chain is whole. Nobody waits for it but what needs the chain to stand still.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from sandyard.errors import SandboxError
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm import disks
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.qmp import QmpError
from sandyard.runtimes.microvm.said import part, records, shown, text

log = structlog.get_logger("sandyard.microvm")

JOB = "shorten"
_POLL = 0.1
_TIMEOUT = 3600.0
_AT_REST = ("concluded", "null")


async def begin(host: Host, instance: MicroVMInstance) -> None:
    """Of a disk that is deep enough, in the background. Whoever calls holds the sandbox's lock."""
    sandbox_id, speed = instance.spec.sandbox_id, host.settings.microvm.disk_mb_s << 20
    try:
        if sandbox_id in host.background or await ended(Disks(host.layout, instance.spec).depth) < disks.DEEPEST:
            return
        arguments = {"job-id": JOB, "device": await instance.disk_node(), "auto-dismiss": False, "speed": speed}
        await instance.control.execute("block-stream", arguments)
    except (SandboxError, OSError) as error:
        _stays(instance, error)
        return
    task = asyncio.ensure_future(_shorten(host, instance))
    host.background[sandbox_id] = task
    task.add_done_callback(lambda done: _forget(host, sandbox_id, done))


async def settle(host: Host, instance: MicroVMInstance, *, call_off: bool = False) -> None:
    """Wait until nothing shortens the disk any more, also nothing that an earlier server began, or call it off; then
    remove what is not needed any more. Raises `SandboxError`."""
    if call_off:
        await _call_off(instance)
    try:
        async with asyncio.timeout(_TIMEOUT):
            await _wait(instance)
    except TimeoutError as error:
        raise SandboxError(f"sandbox {instance.spec.sandbox_id}: its disk is still being made one image") from error
    await ended(lambda: Disks(host.layout, instance.spec).prune(ended=False))


async def _shorten(host: Host, instance: MicroVMInstance) -> None:
    try:
        await settle(host, instance)
    except (SandboxError, OSError) as error:
        _stays(instance, error)


async def _wait(instance: MicroVMInstance) -> None:
    """Until it is over, whatever came of it; then it is no more. Raises `SandboxError`."""
    while True:
        job = await _job(instance)
        if job is None:
            return
        if job.get("status") in _AT_REST:
            if error := job.get("error"):
                _stays(instance, shown(error))
            try:
                await instance.control.execute("job-dismiss", {"id": JOB})
            except QmpError as error:
                if error.kind and await _job(instance) is not None:  # else somebody else did
                    raise
            return
        await asyncio.sleep(_POLL)


async def _call_off(instance: MicroVMInstance) -> None:
    try:
        if await _job(instance) is not None:
            await instance.control.execute("job-cancel", {"id": JOB})
    except QmpError as error:
        if not error.kind:  # it ended by itself
            raise


async def _job(instance: MicroVMInstance) -> Mapping[str, object] | None:
    """What QEMU says of it, if it is there. Raises `SandboxError`."""
    return await instance.control.query("query-jobs", _found)


def _found(said: object) -> Mapping[str, object] | None:
    """Raises `Odd`."""
    return next((job for job in records(said) if text(part(job, "id")) == JOB and text(part(job, "status"))), None)


def _stays(instance: MicroVMInstance, error: object) -> None:
    log.warning("the images of a sandbox stay a chain", sandbox=instance.spec.sandbox_id, error=str(error))


def _forget(host: Host, sandbox_id: str, task: asyncio.Task[None]) -> None:
    if host.background.get(sandbox_id) is task:
        del host.background[sandbox_id]
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the images of a sandbox stay a chain", sandbox=sandbox_id, error=repr(error))
