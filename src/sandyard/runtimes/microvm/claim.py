"""A VMM that stands ready becomes that of a sandbox: with its files, its disks, its control groups, its network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.container.layout import remove_tree
from sandyard.runtimes.exchange import exchange
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm.cgroup import move_groups
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.kind import Kind
from sandyard.runtimes.microvm.launch import move_tap
from sandyard.runtimes.microvm.machine import Drive, device_of
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.record import save_below, save_running
from sandyard.runtimes.microvm.spare import Spare
from sandyard.runtimes.microvm.starting import write_conf


@dataclass(frozen=True, slots=True)
class Claimed:
    """`settled` is to be awaited before its guest runs: only then it is where it is held to its limits."""

    pid: int
    control: Qmp
    settled: Awaitable[None]


@asynccontextmanager
async def claimed(host: Host, spare: Spare, spec: SandboxSpec, memory: str, blank_conf: int) -> AsyncIterator[Claimed]:
    """Let `spare`, which was taken, be the VMM of a sandbox whose disk is there, as `Starter.start_incoming` would
    start one; process and connection are the caller's. `drop` of the spare is due in any case.

    Raises `SandboxError`, `OSError`; what was made until then is left for `Host.end`, and the disk is whole."""
    drives = await ended(_give_files, host, spare, spec, memory, blank_conf)
    assert spare.pid  # 0 is this process to a control group
    # The kernel takes its time.
    settling = asyncio.ensure_future(ended(_give_place, host, spare.name, spare.pid, spare.kind, spec))
    try:
        await _give_disks(spare.control, drives)
        await ended(save_running, host.layout.home(spec.sandbox_id), spec, spare.pid)
        pid, control = spare.hand_over()
        yield Claimed(pid, control, settling)
    finally:
        await finish(asyncio.gather(settling, return_exceptions=True))


def _give_files(host: Host, spare: Spare, spec: SandboxSpec, memory: str, blank_conf: int) -> Sequence[Drive]:
    """The directories that the VMM sees become the sandbox's. Whenever this ends early the sandbox has one of both
    directories, and all of its images are in it."""
    layout, sandbox_id, disks = host.layout, spec.sandbox_id, Disks(host.layout, spec)
    disks.link(spare.own)
    write_conf(disks.kept, bytes(blank_conf))
    drives, files = host.starter.drives(spec)
    for name, path in files.items():
        _link(path, spare.given / name)
    exchange(disks.own, spare.own)
    disks.hand_to(spare.uid)
    remove_tree(layout.given(sandbox_id))  # of the VMM it had before
    spare.given.rename(layout.given(sandbox_id))
    save_below(spare.home, memory)
    spare.home.rename(layout.home(sandbox_id))
    return drives


def _link(path: Path, target: Path) -> None:
    """A file, or those in a directory: what comes there later its VMM needs no more."""
    if not path.is_dir():
        os.link(path, target)
        return
    target.mkdir(0o755)
    target.chmod(0o755)
    for each in path.iterdir():
        if not each.name.startswith("."):
            os.link(each, target / each.name)


def _give_place(host: Host, name: str, pid: int, kind: Kind, spec: SandboxSpec) -> None:
    move_groups(host.cgroups, name, spec.sandbox_id, pid, kind.limits)
    if spec.network is not None:
        move_tap(pid, spec.network, host.starter.gate())


async def _give_disks(control: Qmp, disks: Sequence[Drive]) -> None:
    """What stood in their places stays, which costs nothing."""
    for each in disks:
        nodes = each.nodes()
        for node in nodes:
            await control.execute("blockdev-add", node)
        device = {"path": f"/machine/peripheral/{device_of(each.serial)}", "property": "drive"}
        await control.execute("qom-set", {**device, "value": nodes[-1]["node-name"]})
