"""Take the memory of a guest that stands still, and write it as an image once the guest may go on."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sandyard.errors import SandboxError
from sandyard.runtimes.deltas import Chain, Delta, write_delta
from sandyard.runtimes.deltas.format import Block
from sandyard.runtimes.durable import sync
from sandyard.runtimes.finishing import ended
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import STATE_MAX, digest_file, digest_ram
from sandyard.runtimes.microvm.memory.fitting import load_fit
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, Unfit, part
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
from sandyard.runtimes.microvm.record import load_below, load_region

MAX_DEPTH = 16
"""How many deltas may ever lie on each other, where images come faster than they are compacted."""


class Capture:
    """Of `instance`, to become the image `name`; what is there under that name until then is a draft. `floor`: how
    many deltas of what was written are those that the guest was started from."""

    def __init__(self, host: Host, instance: MicroVMInstance, name: Path, fit: Fit) -> None:
        self._host = host
        self._instance = instance
        self._name = name
        self._fit = fit
        sandbox_id = instance.spec.sandbox_id
        below = load_below(host.layout.home(sandbox_id))
        self._below = host.layout.memory(sandbox_id) / below if below else None
        self._spans: Sequence[Span] = ()
        self.floor = 0

    @classmethod
    async def prepare(cls, host: Host, instance: MicroVMInstance, name: Path) -> Capture:
        """Of one whose VMM was started by this server or another. Raises `SandboxError`."""
        fit = await ended(load_fit, host.layout.home(instance.spec.sandbox_id))
        return cls(host, instance, name, fit)

    async def take(self) -> None:
        """The guest is stopped, and stays so. Costs what it changed. Raises `SandboxError`, `OSError`."""
        scratch = f"state-{secrets.token_hex(4)}"
        own = self._host.layout.disk(self._instance.spec.sandbox_id)
        try:
            arguments = {"filename": str(OWN / scratch), "live": False}
            await self._instance.control.execute("xen-save-devices-state", arguments, timeout=120)
            await ended(self._copy, own / scratch)
        finally:
            (own / scratch).unlink(missing_ok=True)

    def write(self, hostname: str, conf_bytes: int, parent: Path | None, *, durable: bool) -> Manifest:
        """All but the manifest, which is left to be saved. Blocking. Whether the guest runs does not matter. Raises
        `SandboxError`, `OSError`."""
        name = self._name
        state = digest_file(part(name, "state"))
        if self._below is None:
            manifest = Manifest(self._fit, hostname, conf_bytes, state, digest_ram(part(name, "ram")), [])
        else:
            shared = self._share(self._below, parent)
            above = self._write_pages(shared, durable)
            manifest = Manifest(
                self._fit, hostname, shared.conf_bytes, state, shared.ram, above.pages, numbers=above.numbers
            )
        os.link(self._host.layout.block(self._instance.spec.sandbox_id), part(name, "base"))
        part(name, "draft").unlink(missing_ok=True)
        if durable:
            for path in image.parts_of(name, manifest):  # a fork leaves what others get a share of unsynced
                sync(path)
        return manifest

    def _copy(self, state: Path) -> None:
        pid, size = self._instance.pid, self._fit.memory_mb << 20
        if self._below is None:
            copy_whole(find_region(pid, size), part(self._name, "ram"))
            part(self._name, "ram").chmod(0o400)
        else:
            region = Region(pid, load_region(self._host.layout.home(self._instance.spec.sandbox_id)), size)
            self._spans = changed(region)
            copy_out(region, self._spans, part(self._name, "draft"))
        # What the VMM wrote it may still write: a copy is not its own.
        descriptor = os.open(state, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file, open(part(self._name, "state"), "xb") as copy:
            os.fchmod(copy.fileno(), 0o400)
            content = file.read(STATE_MAX + 1)
            if not 0 < len(content) <= STATE_MAX:
                raise SandboxError(f"the VMM wrote a device state of {len(content)} bytes or more")
            copy.write(content)

    def _share(self, below: Path, parent: Path | None) -> Manifest:
        """Share the memory that the new one is written above: what the guest was started from, or an earlier one of
        it."""
        started = image.load(below)
        self.floor = len(started.pages)
        if parent is not None and image.exists(parent):
            with suppress(Unfit, FileNotFoundError):
                if image.load(parent).stands_on(started):
                    return self._seen(image.share(parent, self._name, whats=("ram",)), started)
        return self._seen(image.share(below, self._name, whats=("ram",)), started)

    def _seen(self, shared: Manifest, started: Manifest) -> Manifest:
        if not shared.stands_on(started):  # it was compacted just now
            self.floor = 0
        return shared

    def _write_pages(self, shared: Manifest, durable: bool) -> Manifest:
        """What is shared, with one delta more."""
        paths, what = image.pages_of(self._name, shared), f"pages{shared.next_number}"
        new = part(self._name, what)
        with Chain(part(self._name, "ram"), paths, checked=False) as chain:  # only to leave out what is the same
            blocks = self._differing(chain if paths else None)
            write_delta(new, blocks, block_size=PAGE, size=shared.ram_bytes, parent=what, durable=durable)
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

    def _differing(self, chain: Chain | None) -> Iterator[Block]:
        """The changed pages that are not as they lie below: some were only written again."""
        for first, data in drafted(part(self._name, "draft"), self._spans):
            before = bytearray(len(data))  # views are compared byte by byte, and this as one
            if chain is not None:
                chain.read(first * PAGE, memoryview(before))
                if data == before:
                    continue
            for at in range(0, len(data), PAGE):
                page = data[at : at + PAGE]
                if chain is None or page != before[at : at + PAGE]:
                    yield first + at // PAGE, page
