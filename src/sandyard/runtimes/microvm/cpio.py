"""Writes a cpio archive of the `newc` format, which a kernel unpacks as its first root."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cpio:
    """An archive in memory; parents are added before what is in them."""

    _out: bytearray = field(default_factory=bytearray)
    _count: int = 0

    def directory(self, path: str, mode: int = 0o755) -> None:
        self._entry(path, stat.S_IFDIR | mode, b"")

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        self._entry(path, stat.S_IFREG | mode, data)

    def device(self, path: str, major: int, minor: int, mode: int = 0o600) -> None:
        self._entry(path, stat.S_IFCHR | mode, b"", major, minor)

    def finish(self) -> bytes:
        """The whole archive; nothing may be added after."""
        self._entry("TRAILER!!!", 0, b"")
        return bytes(self._out)

    def _entry(self, path: str, mode: int, data: bytes, major: int = 0, minor: int = 0) -> None:
        name = path.lstrip("/").encode() + b"\0"
        self._count += 1
        # inode, mode, uid, gid, links, mtime, size, device (2), device named (2), length of the name, checksum
        fields = (self._count, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name), 0)
        self._out += b"070701" + b"".join(b"%08x" % number for number in fields) + name
        self._pad()
        self._out += data
        self._pad()

    def _pad(self) -> None:
        self._out += bytes(-len(self._out) % 4)
