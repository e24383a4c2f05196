"""The disk of a memory image: the images that a sandbox's disk consists of get further names, and are its own again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm import commits
from sandyard.runtimes.microvm.disks import BLANK, MOST, Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import seal
from sandyard.runtimes.microvm.memory.image import Manifest


async def share(
    host: Host, spec: SandboxSpec, number: int, target: Path, manifest: Manifest, *, halted: bool, durable: bool
) -> Manifest:
    """Give image `number` of a sandbox's disk, and all below, to the memory image `target`, which then is whole; its
    manifest. Costs what was written since the last time; all of it where the chain is too long. Raises `SandboxError`,
    `OSError`."""
    disks = Disks(host.layout, spec)
    await ended(lambda: disks.keep(number, ended=halted, durable=durable))
    if len(await ended(disks.chain, number)) <= MOST:
        return await ended(lambda: _link(disks, number, target, manifest, durable))
    if halted:
        await commits.commit_halted(host, spec, target, number)
    else:
        await commits.flatten(host, spec, number, target, durable)
    return await ended(lambda: seal(target, manifest, durable=durable))


def _link(disks: Disks, number: int, target: Path, manifest: Manifest, durable: bool) -> Manifest:
    chain = disks.chain(number)
    digests = [disks.digest(path) for path in chain]
    blank = chain[0].name == BLANK
    whole = replace(manifest, disks=digests[blank:], blank=digests[0] if blank else "")
    for path, name in zip(chain, image.disks_of(target, len(whole.disks), blank=blank), strict=True):
        if durable:
            sync(path)  # an earlier fork left it unsynced
        os.link(path, name)
    image.save(target, whole, durable=durable)
    return whole


def give(disks: Disks, layer: Path, manifest: Manifest) -> None:
    """Make the disk of a new sandbox from that of an image. Blocking. Raises `SandboxError`, `OSError`."""
    blank = bool(manifest.blank)
    digests = [*([manifest.blank] if blank else []), *manifest.disks]
    disks.give(image.disks_of(layer, len(manifest.disks), blank=blank), digests, blank=blank)
    disks.add()
