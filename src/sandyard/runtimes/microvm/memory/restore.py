"""Start a guest from a memory image: its RAM mapped, its devices loaded, who it is told, its processes let go on."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import structlog

from sandyard.errors import AgentLinkError, CreateFailed, GuestError, SandboxError
from sandyard.runtimes.base import SandboxSpec
from sandyard.runtimes.deltas import Delta
from sandyard.runtimes.deltas.chain import Piece, overlay
from sandyard.runtimes.deltas.extents import extents
from sandyard.runtimes.finishing import ended, finish
from sandyard.runtimes.microvm import conf
from sandyard.runtimes.microvm.bringup import BringUp, identify, unless_full
from sandyard.runtimes.microvm.choice import Choice
from sandyard.runtimes.microvm.claim import claimed
from sandyard.runtimes.microvm.disks import Disks
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.kind import Kind
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import Checker
from sandyard.runtimes.microvm.memory.fitting import fit_of, save_fit
from sandyard.runtimes.microvm.memory.image import Manifest, Unfit, part
from sandyard.runtimes.microvm.memory.inject import Mapping, map_over
from sandyard.runtimes.microvm.memory.opened import STATE, Opened, opened, take_back
from sandyard.runtimes.microvm.memory.pagemap import PAGE
from sandyard.runtimes.microvm.memory.pages import Region, find_region
from sandyard.runtimes.microvm.memory.sharing import give
from sandyard.runtimes.microvm.qmp import Qmp
from sandyard.runtimes.microvm.record import save_region
from sandyard.runtimes.microvm.said import record, text
from sandyard.runtimes.microvm.spare import Spare

log = structlog.get_logger("sandyard.microvm")

_MAPPED_PAGES = 8  # fewer are copied: a mapping costs more
_MAPPINGS_MAX = 16384
_COPIED_AT_ONCE = 64  # pieces
_HOLE = 1 << 20  # bytes; of smaller ones there are many, and little in them
_LOAD_TIMEOUT = 60.0


class Restorer:
    """Starts guests of `host`."""

    def __init__(self, host: Host, bring_up: BringUp) -> None:
        self._host = host
        self._bring_up = bring_up
        self._checker = Checker()

    def check(self, name: Path, manifest: Manifest) -> None:
        """Blocking. Raises `Unfit`."""
        self._checker.check(name, manifest)

    def trust(self, name: Path, manifest: Manifest) -> None:
        """It was written just now. Blocking. Raises `OSError`."""
        self._checker.trust(name, manifest)

    def trust_last(self, name: Path, manifest: Manifest) -> None:
        """Its topmost pages were written just now. Blocking. Raises `OSError`."""
        self._checker.trust_last(name, manifest)

    async def fitting(self, choice: Choice, spec: SandboxSpec, name: Path) -> Manifest:
        """The manifest of an image that fits. Raises `CreateFailed("snapshot")`; nothing was touched."""

        def look(manifest: Manifest) -> Manifest:
            manifest.fit.check(fit_of(self._host, choice, spec, part(name, "base")), name)
            self._checker.check(name, manifest)
            return manifest

        try:
            return await ended(image.settled, name, look)
        except OSError as error:
            raise CreateFailed("snapshot", f"the memory of {name.name} is not whole: {error}") from error
        except Unfit as error:
            raise CreateFailed("snapshot", error.message, remedy=error.remedy) from error

    async def copy(self, choice: Choice, spec: SandboxSpec, layer: Path, manifest: Manifest) -> MicroVMInstance:
        """A new sandbox with the disk `layer` and the memory beside it. Raises `CreateFailed`; what was made is
        left."""
        manifest = await ended(self._give_disk, spec, layer, manifest)
        instance = await self.start(choice, spec, self._host.layout.memory(spec.sandbox_id) / "0", manifest)
        await unless_full(instance, self._introduce(instance, spec))
        return instance

    async def start(self, choice: Choice, spec: SandboxSpec, name: Path, manifest: Manifest) -> MicroVMInstance:
        """Start the sandbox on its disk with its image `name`: its agent answers, the kernel has time and seed, and
        nothing else runs. Raises `CreateFailed`; what was made is left."""
        kind = self._host.starter.kind(choice, spec)
        with self._host.spares.start():
            instance = await self._by_spare(kind, spec, name, manifest)
            if instance is None:
                with opened(name, manifest) as memory:
                    instance = await self._by_new(choice, spec, memory)
            await unless_full(instance, self._greet(instance, choice))
        self._host.spares.want(kind)
        return instance

    async def _greet(self, instance: MicroVMInstance, choice: Choice) -> None:
        await self._bring_up.relink(instance, choice)
        try:
            await identify(instance, secrets.token_bytes(64))
            await instance.agent.freeze(False, processes=True)
        except (AgentLinkError, GuestError) as error:
            raise CreateFailed("agent", error.message) from error

    async def _by_spare(self, kind: Kind, spec: SandboxSpec, name: Path, manifest: Manifest) -> MicroVMInstance | None:
        """With a VMM that stands ready; None where there is none, or it comes to nothing."""
        spare = self._host.spares.take(kind)
        if spare is None:
            return None
        sandbox_id, claim = spec.sandbox_id, claimed(self._host, spare, spec, name.name, manifest.conf_bytes)
        try:
            with opened(name, manifest) as memory:
                async with claim as vmm:
                    instance = self._hold(spec, vmm.pid)
                    await self._bring_up.control(instance, kind.engine, vmm.control)
                    numbers = await memory.send(vmm.control)
                    await ended(self._fill, sandbox_id, vmm.pid, memory, numbers)
                    await self._load(instance, STATE)
                    await vmm.settled
                    await instance.control.execute("cont")
        except (SandboxError, OSError) as error:
            said = {"sandbox": sandbox_id, "error": str(error)}
            log.warning("a VMM that stood ready was of no use: another one is started", **said)
            await finish(self._host.spares.end(spare))
            await finish(self._host.end(sandbox_id))
            return None
        except BaseException:
            await finish(self._host.spares.end(spare))
            raise
        self._host.spares.later(self._tidy(spare, vmm.control))
        return instance

    async def _tidy(self, spare: Spare, control: Qmp) -> None:
        with suppress(SandboxError):  # it may have ended
            await take_back(control)
        await self._host.spares.end(spare)

    async def _by_new(self, choice: Choice, spec: SandboxSpec, memory: Opened) -> MicroVMInstance:
        starter, name, files = self._host.starter, memory.name.name, memory.ram
        pid = await ended(
            lambda: starter.start_incoming(choice, spec, name, memory.manifest.conf_bytes, [memory.state, *files])
        )
        instance = self._hold(spec, pid)
        await self._bring_up.control(instance, choice.engine)
        try:
            await ended(lambda: self._fill(spec.sandbox_id, pid, memory, files, done_with=files))
            await self._load(instance, str(memory.state))
            await instance.control.execute("cont")
        except (SandboxError, OSError) as error:
            raise CreateFailed("restore", f"{error}: {self._host.said(spec.sandbox_id)}") from error
        return instance

    def _hold(self, spec: SandboxSpec, pid: int) -> MicroVMInstance:
        instance = self._bring_up.hold(spec, pid)
        self._host.instances[spec.sandbox_id] = instance
        return instance

    async def _introduce(self, instance: MicroVMInstance, spec: SandboxSpec) -> None:
        """Tell a copy who it is, then let its processes go on."""
        try:
            await instance.agent.configure(conf.introduction(spec, self._host.settings.network.subnet))
            await instance.agent.freeze(False)
        except (AgentLinkError, GuestError) as error:
            raise CreateFailed("agent", error.message) from error

    def _give_disk(self, spec: SandboxSpec, layer: Path, manifest: Manifest) -> Manifest:
        """Its files; the manifest of those of its memory, which may have become fewer since it was checked."""
        layout = self._host.layout
        memory = layout.memory(spec.sandbox_id)
        try:
            self._host.starter.make_own(spec.sandbox_id)
            memory.mkdir(mode=0o700)
            own_memory = replace(image.share(layer, memory / "0"), disks=(), blank="")
            if own_memory.pages != manifest.pages:
                self._checker.check(memory / "0", own_memory)
            os.link(part(layer, "base"), layout.block(spec.sandbox_id))
            image.save(memory / "0", own_memory, durable=False)
            give(Disks(layout, spec), layer, manifest)
            return own_memory
        except (OSError, SandboxError) as error:
            raise CreateFailed("disk", str(error)) from error

    def _fill(
        self, sandbox_id: str, pid: int, memory: Opened, numbers: Sequence[int], done_with: Sequence[int] = ()
    ) -> None:
        """`numbers`: those that the files have in the VMM, of which it is to close `done_with`."""
        home, manifest = self._host.layout.home(sandbox_id), memory.manifest
        region = find_region(pid, manifest.ram_bytes)
        save_region(home, region.start)
        save_fit(home, manifest.fit)
        _fill(region, image.pages_of(memory.name, manifest), memory.ram[0], numbers, done_with)

    async def _load(self, instance: MicroVMInstance, state: str) -> None:
        """Give it its devices, from the descriptor that it knows as `state`. Raises `SandboxError`."""
        await instance.control.execute("migrate-incoming", {"uri": f"fd:{state}"})
        deadline = time.monotonic() + _LOAD_TIMEOUT
        while time.monotonic() < deadline:
            status = await instance.control.query("query-migrate", lambda said: text(record(said).get("status", "")))
            if status == "completed":
                return
            if status == "failed":
                raise SandboxError("QEMU did not take the device state")
            await asyncio.sleep(0.002)
        raise SandboxError(f"QEMU did not load the device state within {_LOAD_TIMEOUT:g} s")


def _fill(
    region: Region, pages: Sequence[Path], ram: int, descriptors: Sequence[int], done_with: Sequence[int]
) -> None:
    """Give a VMM the RAM of its guest: the file of the first of its `descriptors`, which is `ram` here, above it the
    deltas of the others."""
    mappings = [Mapping(region.start, region.size, descriptors[0]), *holes(region, ram)]
    with ExitStack() as stack:
        deltas = [stack.enter_context(Delta(path)) for path in pages]
        numbers = dict(zip(deltas, descriptors[1:], strict=True))
        pieces = overlay(deltas)
        least = _MAPPED_PAGES
        while sum(piece.end - piece.first >= least for piece in pieces) > _MAPPINGS_MAX:
            least *= 2
        big = [piece for piece in pieces if piece.end - piece.first >= least]
        mappings += _joined(_mapping(region, piece, numbers[piece.delta]) for piece in big)
        map_over(region.pid, mappings, done_with)
        _copy(region, [piece for piece in pieces if piece.end - piece.first < least])


def holes(region: Region, descriptor: int) -> Iterator[Mapping]:
    """Where the guest that booted had nothing: a page of the file's hole would be made for each that a copy writes."""
    end = 0
    for begin, after in (*extents(descriptor), (region.size, region.size)):
        if begin - end >= _HOLE:
            yield Mapping(region.start + end, begin - end)
        end = after


def _mapping(region: Region, piece: Piece, descriptor: int) -> Mapping:
    at, length = region.start + piece.first * PAGE, (piece.end - piece.first) * PAGE
    if piece.run.offset is None:
        return Mapping(at, length)
    return Mapping(at, length, descriptor, piece.run.offset + (piece.first - piece.run.first) * PAGE)


def _joined(mappings: Iterable[Mapping]) -> Iterator[Mapping]:
    """With neighbours that are so in their file too as one: what was changed at a stretch is several runs there."""
    last: Mapping | None = None
    for each in mappings:
        if last is not None and _continues(last, each):
            last = last._replace(length=last.length + each.length)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _continues(last: Mapping, each: Mapping) -> bool:
    where = each.descriptor is None or each.offset == last.offset + last.length
    return where and each.descriptor == last.descriptor and each.at == last.at + last.length


def _copy(region: Region, pieces: Sequence[Piece]) -> None:
    if not pieces:
        return
    with open(f"/proc/{region.pid}/mem", "r+b", buffering=0) as memory:
        for at, data in _contents(pieces):
            if os.pwrite(memory.fileno(), data, region.start + at) != len(data):
                raise SandboxError(f"the memory of the VMM {region.pid} could not be written")


def _contents(pieces: Sequence[Piece]) -> Iterator[tuple[int, bytes]]:
    """What they hold and where, neighbours as one. Not checked again: nor is what is mapped."""
    first, found = 0, list[bytes]()
    for before, piece in zip([None, *pieces], pieces, strict=False):
        if before is not None and (before.end != piece.first or len(found) >= _COPIED_AT_ONCE):
            yield first * PAGE, b"".join(found)
            found.clear()
        if not found:
            first = piece.first
        found.append(piece.delta.peek(piece.run, piece.first, piece.end))
    if found:
        yield first * PAGE, b"".join(found)


def without_layer(spec: SandboxSpec) -> SandboxSpec:
    """Of a copy with memory: its disk holds what the topmost layer had, so that it stands on those below."""
    return replace(spec, rootfs=replace(spec.rootfs, layers=list(spec.rootfs.layers[1:])), memory=None)
