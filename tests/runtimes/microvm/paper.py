"""Guests that are no machines: memory that is a bytearray, captured and started from as that of a guest is."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandyard.runtimes.base import Resources, Rootfs, SandboxSpec
from sandyard.runtimes.deltas import Chain
from sandyard.runtimes.microvm.host import Host
from sandyard.runtimes.microvm.instance import MicroVMInstance
from sandyard.runtimes.microvm.launch import OWN
from sandyard.runtimes.microvm.memory import capture as capturing
from sandyard.runtimes.microvm.memory import image
from sandyard.runtimes.microvm.memory.checking import digest_file, digest_ram
from sandyard.runtimes.microvm.memory.fitting import save_fit
from sandyard.runtimes.microvm.memory.image import Fit, Manifest, part
from sandyard.runtimes.microvm.memory.pagemap import PAGE, Span
from sandyard.runtimes.microvm.record import save_below, save_region

MB = 4
PAGES = (MB << 20) // PAGE
FIT = Fit("tcg", "q35", "max", "7.2", "6.1", 1, MB, 16, False, "image", [])
SPEC = SandboxSpec("one", Rootfs([]), Resources(disk_mb=16), hostname="box")


def memory_of(name: Path) -> bytes:
    """What a guest finds that is started from an image."""

    def read(manifest: Manifest) -> bytes:
        found = bytearray(manifest.ram_bytes)
        with Chain(part(name, "ram"), image.pages_of(name, manifest)) as chain:
            chain.read(0, memoryview(found))
        return bytes(found)

    return image.settled(name, read)


def bytes_of(home: Path) -> int:
    """What is on the disk below a directory, however many names it has."""
    stats = {stat.st_ino: stat.st_blocks * 512 for stat in (path.stat() for path in home.rglob("*"))}
    return sum(stats.values())


def base(name: Path) -> Manifest:
    """An image without deltas."""
    part(name, "ram").write_bytes(os.urandom(1 << 20) + bytes((MB - 1) << 20))
    part(name, "state").write_bytes(b"devices")
    part(name, "base").write_bytes(b"block image")
    made = Manifest(FIT, "box", 4096, digest_file(part(name, "state")), digest_ram(part(name, "ram")), [])
    image.save(name, made, durable=False)
    return made


class PaperGuest:
    """The sandbox "one" of `host`, as its own VMM: what it writes to is `ram`, and it knows which pages."""

    def __init__(self, host: Host, seed: int) -> None:
        self._host = host
        self._dice = random.Random(seed)
        self._changed: set[int] = set()
        self.ram = bytearray()

    @property
    def instance(self) -> MicroVMInstance:
        fake = SimpleNamespace(
            spec=SPEC, pid=os.getpid(), paused=True, control=self, agent=self, disk_node=self.disk_node, thaw=self.thaw
        )
        return cast(MicroVMInstance, fake)

    def start(self, name: Path) -> None:
        """From an image of its own."""
        home = self._host.layout.home("one")
        home.mkdir(exist_ok=True)
        save_fit(home, FIT)
        save_below(home, name.name)
        save_region(home, 0)
        self.ram = bytearray(memory_of(name))
        self._changed.clear()

    def work(self, pages: int) -> None:
        """Change some pages: one of them to zeros, one that has the bytes it had."""
        first = self._dice.randrange(PAGES - pages)
        for number in range(first, first + pages):
            self._write(number, self._dice.randbytes(PAGE))
        self._write(self._dice.randrange(PAGES), bytes(PAGE))
        same = self._dice.randrange(PAGES)
        self._write(same, bytes(self.ram[same * PAGE : (same + 1) * PAGE]))

    def _write(self, number: int, data: bytes) -> None:
        self.ram[number * PAGE : (number + 1) * PAGE] = data
        self._changed.add(number)

    def changed(self, *_: object) -> Sequence[Span]:
        return [(number, number + 1) for number in sorted(self._changed)]

    def copy_out(self, _: object, spans: Sequence[Span], draft: Path) -> None:
        draft.write_bytes(b"".join(self.ram[first * PAGE : end * PAGE] for first, end in spans))

    async def execute(self, command: str, arguments: dict[str, Any] = {}, **_: object) -> list[object]:  # noqa: B006
        if command in ("query-jobs", "block-stream"):
            return []  # it never does
        assert command == "xen-save-devices-state"
        path = self._host.layout.disk("one") / Path(arguments["filename"]).relative_to(OWN)
        path.write_bytes(os.urandom(100))
        return []

    async def query(self, command: str, read: Callable[[Any], object], arguments: dict[str, Any] = {}) -> object:  # noqa: B006
        return read(await self.execute(command, arguments))

    async def disk_node(self) -> str:
        return "disk"

    async def thaw(self) -> None:
        """It never stood still."""


def paper_guest(host: Host, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> PaperGuest:
    guest = PaperGuest(host, seed)
    monkeypatch.setattr(capturing, "changed", guest.changed)
    monkeypatch.setattr(capturing, "copy_out", guest.copy_out)
    return guest
