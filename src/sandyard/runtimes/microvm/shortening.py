"""A guest's disk that has become a long chain of images is made one again while the guest runs.

QEMU brings what lies below to one image, which then says of itself that nothing lies below; at every moment until then
the chain is whole. That image is the uppermost one that the guest does not write to any more, so that snapshots go on
above it meanwhile. Right after a resume there is none, and it is the one that the guest writes to: what comes in the
way calls that off, and it goes on in the same image when another one lies above.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import structlog

from sandyard.errors import SandboxError
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm import disks
from sandyard.runtimes.microvm.disks import MOST, Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.qmp import QmpError
from sandyard.runtimes.microvm.said import part, records, shown, text

log = structlog.get_logger("sandyard.microvm")

JOB = "shorten"  # then a dash and the number of the image
HURRY = 12
"""Images of one sandbox: then they are made one as fast as the host's disk allows, whatever its limit."""
_POLL = 0.1
_PATIENCE = 30.0
_AT_REST = ("concluded", "null")
_NAME = re.compile(r"(file-)?disk(?:-([0-9]{1,6}))?")  # of a node that a VMM was started with, for its disk
_CANCELLED = "Operation canceled"
_Job = Mapping[str, object]


async def begin(host: Host, instance: MicroVMInstance) -> None:
    """Of a disk that is deep enough, in the background. Whoever calls holds the sandbox's turn."""
    sandbox_id = instance.spec.sandbox_id
    if sandbox_id in host.background:
        return  # that looks again when it has its turn
    try:
        top = await _start(host, instance)
    except (SandboxError, OSError) as error:
        _stays(instance, error)
        return
    if top is not None:
        task = asyncio.ensure_future(_shorten(host, instance, top))
        host.background[sandbox_id] = task
        task.add_done_callback(lambda done: _forget(host, sandbox_id, done))


async def make_way(host: Host, instance: MicroVMInstance) -> str | None:
    """Before the image that the guest writes to gets one above it: what is at work stands still until `go_on` with the
    id that this gives. `begin` is due afterwards. Waits only where there are too many images already. Raises
    `SandboxError`.

    A job of QEMU 7.2 that ends while its guest is stopped, or before an image is put above and is let go of after that,
    takes the VMM with it."""
    if (job := await _job(instance)) is None:
        return None
    held = str(job["id"])
    await _tell(instance, "job-pause", {"id": held})
    try:
        job = await _soon(instance, ("paused", *_AT_REST))
        if job is not None and await _is_above(host, instance, job):
            return held
    except BaseException:
        await go_on(instance, held)
        raise
    return None


async def _is_above(host: Host, instance: MicroVMInstance, job: _Job) -> bool:
    """Whether a job that stands still is not in the way of an image above; else it is none any more."""
    if job.get("status") in _AT_REST:
        await _clear(host, instance, job)
        return False
    images = Disks(host.layout, instance.spec)
    if _number(job) >= await ended(images.top):
        await call_off(host, instance)
        return False
    depth = await ended(images.depth)
    if depth >= HURRY:
        await _tell(instance, "block-job-set-speed", {"device": str(job["id"]), "speed": 0})
    if depth > 2 * MOST:
        await go_on(instance, str(job["id"]))
        await _settle(host, instance)
        return False
    return True


async def go_on(instance: MicroVMInstance, held: str | None) -> None:
    """After `make_way`. Raises `SandboxError`."""
    if held is not None:
        await _tell(instance, "job-resume", {"id": held})


async def call_off(host: Host, instance: MicroVMInstance) -> None:
    """Nothing shortens the disk any more, also nothing that an earlier server began. Raises `SandboxError`."""
    if (job := await _job(instance)) is not None:
        await _tell(instance, "job-cancel", {"id": str(job["id"])})
    await _settle(host, instance)


async def _tell(instance: MicroVMInstance, command: str, arguments: _Job) -> None:
    """A job, which may end in that moment, or a node, which may be needed. Raises `SandboxError`."""
    try:
        await instance.control.execute(command, arguments)
    except QmpError as error:
        if not error.kind:
            raise


async def _settle(host: Host, instance: MicroVMInstance) -> None:
    if (job := await _soon(instance, _AT_REST)) is not None:
        await _clear(host, instance, job)


async def _soon(instance: MicroVMInstance, status: Sequence[str]) -> _Job | None:
    """`_until`, for whoever cannot wait long. Raises `SandboxError`."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await _until(instance, status)
    except TimeoutError as error:
        message = f"sandbox {instance.spec.sandbox_id}: the images of its disk are still being made one"
        raise SandboxError(message, remedy="try again later") from error


async def _until(instance: MicroVMInstance, status: Sequence[str]) -> _Job | None:
    """The job once it is of such a status; None where there is none any more. Raises `SandboxError`."""
    pause = 0.001
    while (job := await _job(instance)) is not None and job.get("status") not in status:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _POLL)
    return job


async def _start(host: Host, instance: MicroVMInstance) -> int | None:
    """The uppermost image; None where there is nothing to do. Raises `SandboxError`."""
    images = Disks(host.layout, instance.spec)
    top = await ended(images.top)
    if (job := await _job(instance)) is not None:  # an earlier server's, or one that was not in the way
        await go_on(instance, str(job["id"]))  # if that server was killed while it held it
        return top
    depth = await ended(images.depth)
    if depth < disks.DEEPEST:
        return None
    number = await ended(images.retired)
    if number is None:
        number, node = top, await instance.disk_node()
    else:
        node = f"disk{number}"
        node = node if node in await _nodes(instance) else "disk"  # what its VMM was started with
    speed = 0 if depth >= HURRY else host.settings.microvm.disk_mb_s << 20
    arguments = {"job-id": f"{JOB}-{number}", "device": node, "auto-dismiss": False, "speed": speed}
    await instance.control.execute("block-stream", arguments)
    return top


async def _shorten(host: Host, instance: MicroVMInstance, top: int) -> None:
    """Until nothing is left to do, or there is no more to it than when it was begun."""
    try:
        while True:
            await _until(instance, _AT_REST)
            async with host.turns.of(instance.spec.sandbox_id):
                job = await _job(instance)
                if job is not None and job.get("status") not in _AT_REST:
                    continue
                if job is not None and not await _clear(host, instance, job):
                    return
                later = await ended(Disks(host.layout, instance.spec).top)
                if later == top or await _start(host, instance) is None:
                    return
                top = later
    except (SandboxError, OSError) as error:
        _stays(instance, error)


async def _clear(host: Host, instance: MicroVMInstance, job: _Job) -> bool:
    """After it ended, whatever came of it: let go of what is not needed any more, then of the job, so that a server
    that is killed meanwhile leaves that to the next. Whether it came to something. Raises `SandboxError`."""
    error = job.get("error")
    if error:
        if error != _CANCELLED:
            _stays(instance, shown(error))
    else:
        await ended(Disks(host.layout, instance.spec).shortened, _number(job))
    try:
        await instance.control.execute("job-dismiss", {"id": str(job["id"])})
    except QmpError as failed:
        if not failed.kind or await _job(instance) is not None:  # else somebody else did
            raise
    if not error:
        await _forget_nodes(instance)  # not before: QEMU 7.2 dies of being asked for nodes while it has such a job
    return not error


async def _forget_nodes(instance: MicroVMInstance) -> None:
    """QEMU holds the files that its command line named, and so their place on the disk, until it is told. Raises
    `SandboxError`."""
    found = [match for match in map(_NAME.fullmatch, await _nodes(instance)) if match]
    # What lies above first, and the images before their files.
    for match in sorted(found, key=lambda match: (bool(match[1]), -int(match[2] or "999"))):
        await _tell(instance, "blockdev-del", {"node-name": match[0]})


async def _nodes(instance: MicroVMInstance) -> Sequence[str]:
    """The images that QEMU has open, by its names for them. Raises `SandboxError`."""
    return await instance.control.query("query-named-block-nodes", _named, {"flat": True})


def _named(said: object) -> Sequence[str]:
    """Raises `Odd`, as the one below."""
    return [text(part(each, "node-name")) for each in records(said)]


async def _job(instance: MicroVMInstance) -> _Job | None:
    """What QEMU says of it, if it is there. Raises `SandboxError`."""
    return await instance.control.query("query-jobs", _found)


def _found(said: object) -> _Job | None:
    jobs = (job for job in records(said) if text(part(job, "id")).startswith(JOB))
    return next((job for job in jobs if text(part(job, "status"))), None)


def _number(job: _Job) -> int:
    """Of the image that has all in the end. One that an older version began is the uppermost."""
    number = str(job["id"]).partition("-")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 1 << 30


def _stays(instance: MicroVMInstance, error: object) -> None:
    log.warning("the images of a sandbox stay a chain", sandbox=instance.spec.sandbox_id, error=str(error))


def _forget(host: Host, sandbox_id: str, task: asyncio.Task[None]) -> None:
    if host.background.get(sandbox_id) is task:
        del host.background[sandbox_id]
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the images of a sandbox stay a chain", sandbox=sandbox_id, error=repr(error))
