"""Take the memory of a guest that stands still, and write it as an image once the guest may go on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas import Chain, Delta, Placed, index_delta
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm import disk
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import STATE_MAX, digest_file, digest_ram
from sandyard.runtimes.microvm.memory.fitting import load_fit
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, part
from sandyard.runtimes.microvm.memory.inject import Mapper
from sandyard.runtimes.microvm.memory.merging import lowest, merge
from sandyard.runtimes.microvm.memory.pagemap import PAGE, Span
from sandyard.runtimes.microvm.memory.pages import (
    Region,
    changed,
    copy_out,
    copy_whole,
    drafted,
    find_region,
)
from sandyard.runtimes.microvm.memory.rebasing import Rebased, rebase, release
from sandyard.runtimes.microvm.qcow2 import opened
from sandyard.runtimes.microvm.record import load_below, load_region

MAX_DEPTH = 16
"""How many deltas may ever lie on each other, where images come faster than they are compacted."""


@dataclass(frozen=True, slots=True)
class Below:
    """The image a guest goes on above. `whole`: it is not known what was changed since then."""

    name: Path
    manifest: Manifest
    whole: bool = False


class Capture:
    """Of `instance`, to become the image `name`; what is there under that name until then is a draft. `below`: what its
    memory is mapped from, where it did not boot. `floor`: how many deltas of what was written are those of that."""

    def __init__(self, host: Host, instance: MicroVMInstance, name: Path, fit: Fit, below: Below | None = None) -> None:
        self._host = host
        self._instance = instance
        self._name = name
        self._fit = fit
        self._below = below
        self._spans: Sequence[Span] = ()
        self.floor = 0
        self.rebased: Rebased | None = None

    @classmethod
    async def prepare(cls, host: Host, instance: MicroVMInstance, name: Path) -> Capture:
        """Of one whose VMM was started by this server or another. Raises `SandboxError`."""
        sandbox_id = instance.spec.sandbox_id
        fit = await ended(load_fit, host.layout.home(sandbox_id))
        return cls(host, instance, name, fit, await ended(_below, host, sandbox_id))

    async def take(self) -> None:
        """The guest is stopped, and stays so. Costs what it changed. Raises `SandboxError`, `OSError`."""
        scratch = f"state-{secrets.token_hex(4)}"
        own = self._host.layout.disk(self._instance.spec.sandbox_id)
        try:
            await ended(disk.to_be_written, own, scratch)
            arguments = {"filename": str(OWN / scratch), "live": False}
            await self._instance.control.execute("xen-save-devices-state", arguments, timeout=120)
            await ended(self._copy, own / scratch)
        finally:
            (own / scratch).unlink(missing_ok=True)

    async def rebase(self, mapper: Mapper) -> None:
        """After `take`, the guest still stopped: let it go on above this image, which is one of its own. Raises
        `SandboxError`, `OSError`."""
        if self._below is not None:
            home = self._host.layout.home(self._instance.spec.sandbox_id)
            draft = part(self._name, "pages.draft")
            at, name = self._region(), self._name.name
            self.rebased = await rebase(self._instance, at, self._spans, draft, home, name, mapper)

    async def release(self) -> None:
        """After `rebase`, the guest running again. Raises `SandboxError`."""
        if self.rebased is not None:
            await release(self._instance, self.rebased)

    def write(self, hostname: str, conf_bytes: int, *, durable: bool) -> Manifest:
        """All but the manifest, which is left to be saved. Blocking. Whether the guest runs does not matter. Raises
        `SandboxError`, `OSError`."""
        name = self._name
        state = digest_file(part(name, "state"))
        if self._below is None:
            manifest = Manifest(self._fit, hostname, conf_bytes, state, digest_ram(part(name, "ram")), [])
        else:
            shared = image.share(self._below.name, name, whats=("ram",))
            self.floor = len(shared.pages)
            above = self._write_pages(shared, durable)
            manifest = Manifest(
                self._fit, hostname, shared.conf_bytes, state, shared.ram, above.pages, numbers=above.numbers
            )
        os.link(self._host.layout.block(self._instance.spec.sandbox_id), part(name, "base"))
        if durable:
            for path in image.parts_of(name, manifest):  # a fork leaves what others get a share of unsynced
                sync(path)
        return manifest

    def _region(self) -> Region:
        size, home = self._fit.memory_mb << 20, self._host.layout.home(self._instance.spec.sandbox_id)
        return Region(self._instance.pid, load_region(home), size)

    def _copy(self, state: Path) -> None:
        if self._below is None:
            copy_whole(find_region(self._instance.pid, self._fit.memory_mb << 20), part(self._name, "ram"))
            part(self._name, "ram").chmod(0o400)
        else:
            region = self._region()
            self._spans = [(0, region.size // PAGE)] if self._below.whole else changed(region)
            copy_out(region, self._spans, part(self._name, "pages.draft"))
        # What the VMM wrote it may still write: a copy is not its own.
        with opened(state) as descriptor, open(part(self._name, "state"), "xb") as copy:
            os.fchmod(copy.fileno(), 0o400)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(STATE_MAX + 1)
            if not 0 < len(content) <= STATE_MAX:
                raise SandboxError(f"the VMM wrote a device state of {len(content)} bytes or more")
            copy.write(content)

    def _write_pages(self, shared: Manifest, durable: bool) -> Manifest:
        """What is shared, with one delta more."""
        paths, what = image.pages_of(self._name, shared), f"pages{shared.next_number}"
        new, draft = part(self._name, what), part(self._name, "pages.draft")
        with ExitStack() as stack:
            chain = stack.enter_context(Chain(part(self._name, "ram"), paths, checked=False)) if paths else None
            runs = self._runs(draft, chain)  # what is the same is left out
            index_delta(draft, new, runs, block_size=PAGE, size=shared.ram_bytes, parent=what, durable=durable)
        with Delta(new) as delta:
            made = shared.topped(len(paths), delta.digest.hex())
        return made if len(made.pages) <= MAX_DEPTH else self._flatten(made, durable)

    def _flatten(self, made: Manifest, durable: bool) -> Manifest:
        """Make one delta of several."""
        paths = image.pages_of(self._name, made)
        first = lowest([path.stat().st_size for path in paths], self.floor)
        if first is None:
            return made
        later = merge(self._name, made, first, durable=durable)
        for path in paths[first:]:
            path.unlink()
        return later

    def _runs(self, draft: Path, chain: Chain | None) -> Iterator[Placed]:
        """What of the draft is kept: not the pages that are as they lie below, which were only written again, but for
        those that the guest has from there now."""
        mapped = self.rebased.mapped if self.rebased is not None else frozenset()
        for span, run in drafted(draft, self._spans):
            if chain is None or span in mapped:
                yield run
            else:
                yield from _differing(run, chain)


def _differing(run: Placed, chain: Chain) -> Iterator[Placed]:
    before = bytearray(len(run.data))
    chain.read(run.first * PAGE, memoryview(before))
    begin: int | None = None
    for at in range(0, len(run.data) + 1, PAGE):
        page = run.data[at : at + PAGE]
        if page and page != before[at : at + PAGE]:
            begin = at if begin is None else begin
        elif begin is not None:
            yield Placed(run.first + begin // PAGE, run.offset + begin, run.data[begin:at])
            begin = None


def _below(host: Host, sandbox_id: str) -> Below | None:
    """Raises `SandboxError`."""
    home, name = host.layout.memory(sandbox_id), load_below(host.layout.home(sandbox_id))
    if not name:
        return None
    if image.exists(home / name):
        return Below(home / name, image.load(home / name))
    # Its server ended, or the disk was full, before that image was whole. An earlier one is there: any will do.
    for number in range(image.newest(home), -1, -1):
        if image.exists(home / str(number)):
            return Below(home / str(number), image.load(home / str(number)), whole=True)
    raise SandboxError(f"the memory that sandbox {sandbox_id} goes on above is gone")
